"""SGLang: its DeepEP dispatcher in both modes, both values of their flags, and switching between the modes."""

from __future__ import annotations

import importlib
import json
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from . import flows, layer, stand_ins
from .harness import Case, Rank
from .layer import Shape, Tensor

MOE = "sglang.srt.layers.moe"
DEEPEP = f"{MOE}.token_dispatcher.deepep"
MOST_TOKENS = 64
ALIGNMENT = 128
"""Of the counts of received rows, as DeepGEMM needs them."""

gemm = {"ENABLE_JIT_DEEPGEMM": True, "DEEPGEMM_BLACKWELL": False, "DEEPGEMM_SCALE_UE8M0": False}
flags = SimpleNamespace(moe=SimpleNamespace(deepep_config="", tbo_enabled=False))
resources = SimpleNamespace(buffers={})
state = SimpleNamespace(prefill=True)

CONFIG = {
    "num_sms": 24,
    "num_max_nvl_chunked_send_tokens": 16,
    "num_max_nvl_chunked_recv_tokens": 512,
    "num_max_rdma_chunked_send_tokens": 16,
    "num_max_rdma_chunked_recv_tokens": 128,
}
IMPORTED = [DEEPEP, f"{MOE}.token_dispatcher.base", f"{MOE}.utils"]


def load(here: Rank) -> None:
    stand_ins.provide(here.source, ["sglang"], IMPORTED, given(here))
    # It recommends to tune the number of multiprocessors.
    logging.getLogger("sglang").setLevel(logging.ERROR)
    if here.device.type == "cpu":
        setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))  # noqa: B010


def setting(value: Any) -> Any:
    """One of SGLang's environment variables."""
    return SimpleNamespace(get=lambda: value, is_set=lambda: False)


def given(here: Rank) -> dict[str, dict[str, Any]]:
    """What the modules import besides."""

    def no(*_: Any) -> bool:
        return False

    environ = SimpleNamespace(
        SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=setting(MOST_TOKENS),
        SGLANG_DEEPEP_BF16_DISPATCH=setting(False),
        SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE=setting(False),
    )
    quant = {"sglang_per_token_group_quant_fp8": _quantize}
    return {
        "sglang.srt.environ": {"envs": environ},
        "sglang.srt.eplb.expert_distribution": {"get_global_expert_distribution_recorder": stand_ins.Silent},
        "sglang.srt.layers.deep_gemm_wrapper": gemm,
        "sglang.srt.layers.dp_attention": {"get_is_extend_in_batch": lambda: state.prefill},
        "sglang.srt.runtime_context": {
            "get_resources": lambda: resources,
            "get_flags": lambda: flags,
            "get_server_args": lambda: None,
        },
        "sglang.srt.utils": {
            "get_bool_env_var": no,
            "get_cuda_version": lambda: (13, 0),
            "is_blackwell": no,
            "is_cuda": lambda: here.device.type == "cuda",
            "is_flashinfer_available": no,
            "is_hip": no,
            "is_npu": no,
            "load_json_config": json.loads,
        },
        "sglang.kernels.ops.quantization.fp8_kernel": quant,
        "sglang.srt.layers.quantization.fp8_kernel": quant,
    }


def cases() -> list[Case]:
    def case(name: str, **named: Any) -> Case:
        return Case(name, partial(_serve, **named))

    return [
        case("normal, async_finish=False", mode="normal"),
        case("normal, async_finish=True", mode="normal", asynchronous=True),
        case("normal, FP8, async_finish=False", mode="normal", fp8=True),
        case("normal, FP8, async_finish=True", mode="normal", fp8=True, asynchronous=True),
        case("normal, FP8, UE8M0 scales", mode="normal", fp8=True, ue8m0=True, asynchronous=True),
        case("normal, with a config", mode="normal", config=True),
        case("normal, dropped choices", mode="normal", dropped=True),
        case("normal, two batches in turns", mode="normal", asynchronous=True, turns=True),
        case("low latency, return_recv_hook=False", mode="low_latency"),
        case("low latency, return_recv_hook=True", mode="low_latency", hook=True),
        case("low latency, FP8", mode="low_latency", fp8=True, hook=True),
        case("low latency, FP8, UE8M0 scales", mode="low_latency", fp8=True, ue8m0=True, hook=True),
        case("low latency, two batches in turns", mode="low_latency", hook=True, turns=True),
        case("auto: prefill and decode in turns", mode="auto", hook=True, asynchronous=True),
    ]


def _quantize(x: Tensor, size: int, column_major_scales: bool, scale_tma_aligned: bool, scale_ue8m0: bool) -> Any:
    """In place of a CUDA kernel: FP8 rows; scales lie by columns, four UE8M0 in an int32, where these are asked for."""
    codes, scales = layer.fp8(x, power_of_two=scale_ue8m0, block=size)
    if scale_ue8m0:
        scales = layer.ue8m0(scales).view(torch.int32)
    if column_major_scales:
        rows = -(-x.shape[0] // 4) * 4 if scale_tma_aligned else x.shape[0]
        columns = scales.new_zeros(scales.shape[1], rows)
        columns[:, : x.shape[0]] = scales.t()
        scales = columns.t()[: x.shape[0]]
    return codes, scales


def _serve(
    here: Rank,
    mode: str,
    asynchronous: bool = False,
    hook: bool = False,
    fp8: bool = False,
    ue8m0: bool = False,
    config: bool = False,
    turns: bool = False,
    dropped: bool = False,
) -> None:
    deepep = importlib.import_module(DEEPEP)
    wrapper: Any = importlib.import_module("sglang.srt.layers.deep_gemm_wrapper")
    wrapper.DEEPGEMM_BLACKWELL = wrapper.DEEPGEMM_SCALE_UE8M0 = ue8m0
    # Each case is a model of its own.
    resources.buffers.clear()
    deepep.DeepEPConfig._instance = None
    flags.moe.deepep_config = json.dumps({"normal_dispatch": CONFIG, "normal_combine": CONFIG}) if config else ""
    sizes = {"hidden": max(here.hidden, 512)} if mode == "normal" else {"hidden": 2048, "tokens": 40}
    shape = here.shape(**sizes)

    def made() -> Any:
        dispatcher = deepep.DeepEPDispatcher(
            group=here.group,
            router_topk=shape.topk,
            num_experts=shape.experts,
            num_local_experts=shape.local,
            hidden_size=shape.hidden,
            params_dtype=torch.bfloat16,
            deepep_mode=deepep.DeepEPMode(mode),
            async_finish=asynchronous,
            return_recv_hook=hook,
        )
        dispatcher.set_quant_config({"dispatcher_output_dtype": "fp8" if fp8 else "bf16"})
        return dispatcher

    dispatchers = [(made(), made()) for _ in range(flows.LAYERS)]

    def moe(at: int, x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        state.prefill = mode != "auto" or at % 2 == 0

        def result(dispatched: Any) -> Any:
            return _experts(dispatched, shape, w1, w2)

        def routed(part: slice) -> Any:
            # SGLang's routers give int32.
            return x[part], SimpleNamespace(topk_ids=topk_idx[part].int(), topk_weights=weights[part])

        one, other = dispatchers[at]
        if not turns:
            y: Tensor = one.combine(result(one.dispatch(*routed(slice(None)))))
            return y
        half = x.shape[0] // 2
        one.dispatch_a(*routed(slice(None, half)))
        other.dispatch_a(*routed(slice(half, None)))
        one.combine_a(result(one.dispatch_b()))
        received = other.dispatch_b()
        first = one.combine_b()
        other.combine_a(result(received))
        return torch.cat([first, other.combine_b()])

    there_and_back = partial(layer.fp8_there_and_back, power_of_two=ue8m0) if fp8 else None
    flows.serve(here, moe, shape, dropped=dropped, there_and_back=there_and_back)


def _experts(got: Any, shape: Shape, w1: Tensor, w2: Tensor) -> Any:
    """What the experts make of dispatched rows, in the form that combines take."""
    rows, scales, idx, weights, counts = got[:5]
    if scales is not None:
        rows = layer.from_fp8(rows, scales)
    if got.format.value == "deepep_normal":
        there = torch.bincount(idx[idx >= 0], minlength=shape.local)
        expected = (-(-there // ALIGNMENT) * ALIGNMENT).tolist()
        if counts != expected:
            raise AssertionError(f"counts are {counts}, expected: {expected}")
        return layer.rowwise(rows, idx, weights, w1, w2), idx, weights
    results = torch.zeros(rows.shape, dtype=torch.bfloat16, device=rows.device)
    for number, count in enumerate(counts.tolist()):
        results[number, :count] = layer.expert(rows[number, :count], w1[number], w2[number]).bfloat16()
    return results, idx, weights
