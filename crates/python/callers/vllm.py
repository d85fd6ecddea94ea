"""vLLM: its managers of DeepEP's buffers and what prepares and finalizes a layer with them, in both modes; also with dual batch overlap."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from . import flows, layer, stand_ins
from .harness import LIMIT, Case, Rank
from .layer import Shape, Tensor

MOE = "vllm.model_executor.layers.fused_moe"
HT, LL = f"{MOE}.prepare_finalize.deepep_ht", f"{MOE}.prepare_finalize.deepep_ll"
ALL2ALL = "vllm.distributed.device_communicators"
UBATCHING = "vllm.v1.worker.ubatching"
MOST_TOKENS = 64
BLOCK = [128, 128]
IMPORTED = [
    HT,
    LL,
    f"{MOE}.modular_kernel",
    f"{MOE}.topk_weight_and_reduce",
    f"{ALL2ALL}.all2all",
    f"{ALL2ALL}.base_device_communicator",
    UBATCHING,
]


def load(here: Rank) -> None:
    stand_ins.provide(here.source, ["vllm"], IMPORTED, given(here))
    if here.device.type == "cpu":
        torch.accelerator.synchronize = lambda *_: None
        # There are no streams in which a tensor could be used.
        ht: Any = importlib.import_module(HT)
        ht._dbo_record_stream = lambda *_: None


def given(here: Rank) -> dict[str, dict[str, Any]]:
    """What the modules import besides."""
    cuda = here.device.type == "cuda"
    alone = SimpleNamespace(rank_in_group=here.rank, world_size=here.ranks)
    envs = {
        "VLLM_DEEPEP_BUFFER_SIZE_MB": 1024,
        "VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE": False,
        "VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL": False,
        "VLLM_DEEPEPLL_NVFP4_DISPATCH": False,
    }
    platform = SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: cuda, fp8_dtype=lambda: torch.float8_e4m3fn)
    return {
        "vllm.envs": envs,
        "vllm.logger": {"init_logger": lambda _: stand_ins.Silent()},
        "vllm.config": {"get_current_vllm_config": _config},
        "vllm.distributed.parallel_state": {
            "get_dp_group": lambda: alone,
            "get_tp_group": lambda: SimpleNamespace(rank_in_group=0, world_size=1),
            "in_the_same_node_as": lambda group, source_rank: [True] * group.size(),
        },
        "vllm.forward_context": {"_forward_context": None},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils.math_utils": {"round_up": lambda x, y: -(-x // y) * y},
        "vllm.utils.torch_utils": {
            "current_stream": torch.cuda.current_stream if cuda else lambda: NoStream.only,
            "PIN_MEMORY": cuda,
        },
        "vllm.utils.import_utils": {"has_deep_ep": lambda: importlib.util.find_spec("deep_ep") is not None},
        "vllm._custom_ops": {"moe_sum": lambda x, out: out.copy_(x.float().sum(1))},
        f"{MOE}.activation": {"MoEActivation": SimpleNamespace(SILU="silu")},
        f"{MOE}.utils": {
            "moe_kernel_quantize_input": _quantize,
            "normalize_batched_scales_shape": lambda scales, _: scales,
        },
    }


def cases() -> list[Case]:
    def ht(name: str, **named: Any) -> Case:
        return Case(f"high throughput, {name}", partial(_high_throughput, **named))

    def ll(name: str, **named: Any) -> Case:
        return Case(f"low latency, {name}", partial(_low_latency, **named))

    return [
        ht("prepare, finalize"),
        ht("prepare_async, finalize_async", kernel=True),
        ht("FP8 in blocks", kernel=True, fp8=True),
        ht("dropped choices", kernel=True, dropped=True),
        ht("dual batch overlap", overlap=True),
        ll("prepare, finalize"),
        ll("prepare_async, finalize_async", kernel=True),
        ll("FP8", kernel=True, fp8=True),
        ll("FP8, UE8M0 scales", kernel=True, fp8=True, ue8m0=True),
        ll("dropped choices", kernel=True, dropped=True),
        ll("dual batch overlap", overlap=True),
        ll("fault tolerance", kernel=True, fault_tolerance=True),
    ]


_tolerant = False


def _config() -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(enable_fault_tolerance=_tolerant))


def _quantize(
    x: Tensor, scale: Any, quant_dtype: Any, per_act_token_quant: bool, block_shape: Any = None, **_: Any
) -> Any:
    """In place of CUDA kernels: none, FP8 with a scale for every 128 elements, or with a UE8M0 scale for every 32."""
    if quant_dtype is None:
        return x, None
    if quant_dtype == "mxfp8":
        codes, scales = layer.fp8(x, power_of_two=True, block=32)
        return codes, layer.ue8m0(scales)
    assert quant_dtype == torch.float8_e4m3fn and block_shape == BLOCK
    return layer.fp8(x)


def _quant_config(fp8: bool, mxfp8: bool) -> Any:
    return SimpleNamespace(
        quant_dtype="mxfp8" if mxfp8 else torch.float8_e4m3fn if fp8 else None,
        is_block_quantized=fp8,
        block_shape=BLOCK if fp8 else None,
        per_act_token_quant=False,
        is_scale_swizzled=False,
        mx_alignment=0,
        a1_scale=None,
        a2_scale=None,
        a1_gscale=None,
    )


def kernel_of(prepare_finalize: Any, fp8: bool, ue8m0: bool = False, mxfp8: bool = False) -> Any:
    """vLLM's modular kernel around experts of ours, of which its preparing and finalizing halves are called."""
    reduce = importlib.import_module(f"{MOE}.topk_weight_and_reduce")
    experts = SimpleNamespace(
        moe_config=SimpleNamespace(moe_parallel_config=None),
        quant_config=_quant_config(fp8, mxfp8),
        expects_unquantized_inputs=False,
        finalize_weight_and_reduce_impl=reduce.TopKWeightAndReduceDelegate,
        supports_packed_ue8m0_act_scales=lambda: ue8m0,
    )
    prepare_finalize.post_init_setup(experts)
    return importlib.import_module(f"{MOE}.modular_kernel").FusedMoEKernelModularImpl(prepare_finalize, experts)


def halves(made: Any, kernel: bool, shape: Shape) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``prepare(x, weights, idx)`` and ``finalize(output, result, weights, idx)``, as the kernel calls them or one by one."""
    if kernel:

        def prepare(x: Tensor, weights: Tensor, idx: Tensor) -> Any:
            return made._prepare(x, weights, idx, shape.experts, None, False)

        def finalize(output: Tensor, result: Tensor, weights: Tensor, idx: Tensor) -> None:
            made._finalize(output, result, None, weights, idx, False, None, None)

        return prepare, finalize
    one, experts = made.prepare_finalize, made.fused_experts

    def prepare_one(x: Tensor, weights: Tensor, idx: Tensor) -> Any:
        *rest, theirs, their_weights = one.prepare(
            x, weights, idx, shape.experts, None, False, experts.quant_config, False
        )
        return *rest, idx if theirs is None else theirs, weights if their_weights is None else their_weights

    def finalize_one(output: Tensor, result: Tensor, weights: Tensor, idx: Tensor) -> None:
        one.finalize(output, result, weights, idx, False, experts.finalize_weight_and_reduce_impl())

    return prepare_one, finalize_one


def _high_throughput(
    here: Rank, kernel: bool = False, fp8: bool = False, overlap: bool = False, dropped: bool = False
) -> None:
    shape = here.shape()
    # vLLM gives DeepEP its gloo group, also for tensors on GPUs.
    manager = importlib.import_module(f"{ALL2ALL}.all2all").DeepEPHTAll2AllManager(here.cpu_group)
    manager.set_num_sms(20)
    first = here.rank * shape.local
    made = importlib.import_module(HT).DeepEPHTPrepareAndFinalize
    layers = []
    for _ in range(flows.LAYERS):
        # Each layer asks for a buffer: it is the same one.
        one = made(manager.get_handle({}), num_dispatchers=here.ranks, dp_size=here.ranks, rank_expert_offset=first)
        layers.append(halves(kernel_of(one, fp8), kernel or overlap, shape))

    def moe(at: int, x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        prepare, finalize = layers[at]
        rows, scales, told, idx, row_weights = prepare(x, weights, topk_idx)
        if fp8:
            rows = (rows.float().view(*scales.shape, 128) * scales.unsqueeze(-1)).view(rows.shape)
        # Choices come back as experts of all ranks; those of other ranks must not count.
        local = torch.where((idx >= first) & (idx < first + shape.local), idx - first, -1)
        counts = torch.bincount(local[local >= 0], minlength=shape.local)
        if told.expert_num_tokens.tolist() != counts.tolist():
            raise AssertionError(f"counts are {told.expert_num_tokens.tolist()}, expected: {counts.tolist()}")
        results = torch.zeros(rows.shape[0], shape.topk, shape.hidden, device=x.device)
        for number in range(shape.local):
            row, choice = (local == number).nonzero(as_tuple=True)
            results[row, choice] = layer.expert(rows[row], w1[number], w2[number])
        results = results.bfloat16() if rows.shape[0] else rows.new_empty(0, shape.hidden).bfloat16()
        output = torch.full_like(x, float("nan"))
        finalize(output, results, row_weights, idx)
        return output

    there_and_back = layer.fp8_there_and_back if fp8 else None
    if overlap:
        overlapped(here, shape, moe)
    else:
        flows.serve(here, moe, shape, dropped=dropped, there_and_back=there_and_back)
    manager.destroy()


def _low_latency(
    here: Rank,
    kernel: bool = False,
    fp8: bool = False,
    ue8m0: bool = False,
    overlap: bool = False,
    dropped: bool = False,
    fault_tolerance: bool = False,
) -> None:
    global _tolerant
    _tolerant = fault_tolerance
    shape = here.shape(tokens=40, hidden=2048)
    all2all = importlib.import_module(f"{ALL2ALL}.all2all")
    manager = all2all.DeepEPLLAll2AllManager(here.cpu_group)
    sizes = {
        "max_num_tokens_per_dp_rank": MOST_TOKENS,
        "token_hidden_size": shape.hidden,
        "num_ep_ranks": here.ranks,
        "num_global_experts": shape.experts,
        "num_local_experts": shape.local,
    }
    made = importlib.import_module(LL).DeepEPLLPrepareAndFinalize
    layers = []
    for _ in range(flows.LAYERS):
        one = made(
            manager.get_handle(sizes),
            max_tokens_per_rank=MOST_TOKENS,
            num_dispatchers=here.ranks,
            use_fp8_dispatch=fp8,
        )
        layers.append(halves(kernel_of(one, fp8, ue8m0), kernel or overlap, shape))

    def moe(at: int, x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        prepare, finalize = layers[at]
        rows, scales, told, idx, row_weights = prepare(x, weights, topk_idx)
        results = torch.zeros(rows.shape, dtype=torch.bfloat16, device=x.device)
        if fp8:
            rows = layer.from_fp8(rows, scales)
        for number, count in enumerate(told.expert_num_tokens.tolist()):
            results[number, :count] = layer.expert(rows[number, :count], w1[number], w2[number]).bfloat16()
        output = torch.full_like(x, float("nan"))
        finalize(output, results, row_weights, idx)
        return output

    if fault_tolerance:
        _clean(here, manager)
    if overlap:
        overlapped(here, shape, moe)
    else:
        there_and_back = partial(layer.fp8_there_and_back, power_of_two=ue8m0) if fp8 else None
        flows.serve(here, moe, shape, dropped=dropped, there_and_back=there_and_back)
    if fault_tolerance:
        _clean(here, manager)
        flows.serve(here, moe, shape)
    manager.destroy()


def _clean(here: Rank, manager: Any) -> None:
    """What vLLM does after a fault: cleans the buffers and masks, and asks who is there."""
    type(manager)._mask = torch.zeros(here.ranks, dtype=torch.int32, device=here.device)
    manager.clean_buffers()
    if manager.query_active_mask().tolist() != [0] * here.ranks or bool(manager.query_fault()):
        raise AssertionError(f"mask is {manager.query_active_mask().tolist()}, expected: zeros")


class NoStream:
    """In place of streams and their events, where there are none."""

    only: Any

    def record(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass


NoStream.only = NoStream()


def overlapped(here: Rank, shape: Shape, moe: flows.Moe) -> None:
    """Two threads take turns, each with batches of its own: vLLM's dual batch overlap. Threads and turns are vLLM's."""
    ubatching = importlib.import_module(UBATCHING)
    cuda = here.device.type == "cuda"
    streams = [torch.cuda.Stream() if cuda else NoStream.only for _ in range(2)]
    for number in range(flows.STEPS):
        barrier = threading.Barrier(3)
        contexts = ubatching.make_ubatch_contexts(2, *streams, [object(), object()], barrier)
        share = flows.all_local(shape, here.rank)
        steps = [flows.Step(here, shape, 2 * number + half, share, False) for half in range(2)]
        errors: list[BaseException] = []

        def half(context: Any, step: flows.Step, errors: list[BaseException] = errors) -> None:
            if cuda:
                torch.cuda.set_device(here.device)
            try:
                with context, torch.inference_mode():
                    step.forward(moe, grad=False)
                    if cuda:
                        torch.cuda.current_stream().synchronize()
            except BaseException as error:
                errors.append(error)

        for context in contexts:
            if not cuda:
                context.gpu_comm_done_event = context.gpu_compute_done_event = NoStream.only
        threads = [threading.Thread(target=half, args=both, daemon=True) for both in zip(contexts, steps, strict=True)]
        for thread in threads:
            thread.start()
        barrier.wait()
        contexts[0].cpu_wait_event.set()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        if any(thread.is_alive() for thread in threads):
            raise AssertionError("a thread did not end within 60 s")
        for step in steps:
            with torch.inference_mode():
                step.compare(False, None, LIMIT)
