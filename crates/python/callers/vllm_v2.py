"""vLLM: its manager of DeepEP V2's buffers and what prepares and finalizes a layer with them, for prefill (expanded rows, counts on the host) and
for decode (counts on the device); also with dual batch overlap."""

from __future__ import annotations

import importlib
import os
import shutil
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from . import flows, layer, stand_ins, vllm
from .harness import Case, Rank
from .layer import Shape, Tensor
from .vllm import ALL2ALL, MOE, UBATCHING

V2 = f"{MOE}.prepare_finalize.deepep_v2"
IMPORTED = [
    V2,
    f"{MOE}.modular_kernel",
    f"{MOE}.topk_weight_and_reduce",
    f"{ALL2ALL}.all2all",
    f"{ALL2ALL}.base_device_communicator",
    UBATCHING,
]

forward = SimpleNamespace(dp_metadata=None)
"""vLLM's forward context."""


def load(here: Rank) -> None:
    if not stand_ins.file_of(here.source, V2).is_file():
        raise RuntimeError(f"{V2} is not in this checkout: take one with V2, such as 0.33.0")
    compiled = here.device.type == "cuda" and any(map(shutil.which, ("cc", "gcc", "clang")))
    given = vllm.given(here)
    given["vllm.envs"].update(VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE=True, VLLM_DEEPEP_V2_PREFER_OVERLAP=False)
    given["vllm.forward_context"]["get_forward_context"] = lambda: forward
    given["vllm.utils.math_utils"]["cdiv"] = lambda x, y: -(-x // y)
    # vLLM's asks for NCCL 2.30.4 or later, too.
    given["vllm.utils.import_utils"]["has_deep_ep_v2"] = lambda: True
    given["vllm.utils.import_utils"]["deep_ep_v2_unavailable_reason"] = lambda: None
    given["vllm.model_executor.layers.quantization.utils.mxfp8_utils"] = {"MXFP8_BLOCK_SIZE": 32}
    given["vllm.triton_utils"] = _triton() if compiled else {"triton": SimpleNamespace(jit=stand_ins.decorator)}
    stand_ins.provide(here.source, ["vllm"], IMPORTED, given)
    # Else vLLM asks NCCL whether GPUs can post to a network.
    os.environ["EP_DISABLE_GIN"] = "1"
    v2: Any = importlib.import_module(V2)
    if not compiled:
        v2._globalize_recv_topk_idx = _globalized
    if here.device.type == "cpu":
        # Before that it runs NCCL.
        importlib.import_module(f"{ALL2ALL}.all2all").DeepEPV2All2AllManager._check_gin_support = lambda *_: None


def cases() -> list[Case]:
    def prefill(name: str, **named: Any) -> Case:
        return Case(f"prefill, {name}", partial(_serve, **named))

    def decode(name: str, **named: Any) -> Case:
        return Case(f"decode, {name}", partial(_serve, decode=True, **named))

    return [
        prefill("prepare, finalize", kernel=False),
        prefill("prepare_async, finalize_async"),
        prefill("results summed at their rank", reduced=True),
        prefill("FP8 in blocks", fp8=True),
        prefill("MXFP8", mxfp8=True),
        prefill("dropped choices", dropped=True),
        prefill("dual batch overlap", overlap=True),
        decode("prepare, finalize", kernel=False),
        decode("prepare_async, finalize_async"),
        decode("results summed at their rank", reduced=True),
        decode("FP8 in blocks", fp8=True),
        decode("MXFP8", mxfp8=True),
        decode("dropped choices", dropped=True),
        decode("experts that take local choices", local_choices=True),
        decode("dual batch overlap", overlap=True),
    ]


def _serve(
    here: Rank,
    decode: bool = False,
    kernel: bool = True,
    fp8: bool = False,
    mxfp8: bool = False,
    dropped: bool = False,
    overlap: bool = False,
    reduced: bool = False,
    local_choices: bool = False,
) -> None:
    shape = here.shape()
    first = here.rank * shape.local
    envs: Any = importlib.import_module("vllm.envs")
    envs.VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION = reduced
    manager = importlib.import_module(f"{ALL2ALL}.all2all").DeepEPV2All2AllManager(here.cpu_group, None, here.group)
    layers = []
    for _ in range(flows.LAYERS):
        # Each layer asks for a buffer: it is the same one.
        sizes = {
            "num_max_tokens_per_rank": shape.tokens,
            "hidden": shape.hidden,
            "num_topk": shape.topk,
            "num_experts": shape.experts,
            "use_fp8_dispatch": fp8,
        }
        one = importlib.import_module(V2).DeepEPV2PrepareAndFinalize(
            manager.get_handle(sizes),
            num_dispatchers=here.ranks,
            dp_size=here.ranks,
            rank_expert_offset=first,
            num_experts=shape.experts,
            num_topk=shape.topk,
            use_fp8_dispatch=fp8,
            use_cudagraph=decode,
        )
        made = vllm.kernel_of(one, fp8, mxfp8=mxfp8)
        one.defer_globalize = local_choices
        layers.append(vllm.halves(made, kernel, shape))

    def moe(at: int, x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        prepare, finalize = layers[at]
        tokens = torch.zeros(here.ranks, dtype=torch.int64)
        tokens[here.rank] = x.shape[0]
        dist.all_reduce(tokens, group=here.cpu_group)
        forward.dp_metadata = SimpleNamespace(num_tokens_across_dp_cpu=tokens)
        rows, scales, told, idx, row_weights = prepare(x, weights, topk_idx)
        if (scales is None) == (fp8 or mxfp8):
            raise AssertionError(f"scales are {scales if scales is None else scales.dtype}")
        if scales is not None:
            rows = layer.from_fp8(rows, scales)
        if local_choices:
            idx = _globalized(idx, told.psum_recv_per_rank, told.rank_expert_offset, shape.experts)
        came = _came(shape, decode, rows, told, idx, first, int(tokens.max()))
        results = torch.zeros(*idx.shape, shape.hidden, device=x.device)
        # Nothing is read behind the rows that came.
        results[came:] = float("nan")
        for number in range(shape.local):
            row, choice = (idx == first + number).nonzero(as_tuple=True)
            results[row, choice] = layer.expert(rows[row], w1[number], w2[number])
        output = torch.full_like(x, float("nan"))
        finalize(output, results.bfloat16().flatten(0, 1), row_weights, idx)
        return output

    there_and_back = None
    if fp8 or mxfp8:
        there_and_back = partial(layer.fp8_there_and_back, power_of_two=mxfp8, block=32 if mxfp8 else 128)
    if overlap:
        vllm.overlapped(here, shape, moe)
    else:
        flows.serve(here, moe, shape, dropped=dropped, there_and_back=there_and_back)
    manager.destroy()


def _came(shape: Shape, decode: bool, rows: Tensor, told: Any, idx: Tensor, first: int, most_tokens: int) -> int:
    """How many rows came, after a look at what was told of them."""
    local = (idx - first)[idx >= 0]
    if local.numel() and (int(local.min()) < 0 or int(local.max()) >= shape.local):
        raise AssertionError(f"experts are {idx.unique().tolist()}, expected: {first} to {first + shape.local - 1}")
    if not decode:
        counts = torch.bincount(local, minlength=shape.local).tolist()
        if told.expert_num_tokens.tolist() != counts or rows.shape[0] != sum(counts):
            said = f"{told.expert_num_tokens.tolist()} of {rows.shape[0]} rows"
            raise AssertionError(f"counts are {said}, expected: {counts} of {sum(counts)}")
        return rows.shape[0]
    came = int((idx >= 0).any(1).sum())
    room = shape.ranks << (most_tokens - 1).bit_length()
    if rows.shape[0] != room or int(told.psum_recv_per_rank[-1]) != came or bool((idx[came:] >= 0).any()):
        said = f"{told.psum_recv_per_rank.tolist()} of {rows.shape[0]} rows"
        raise AssertionError(f"rows by rank are {said}, expected: up to {came} of {room}, the first ones")
    return came


def _globalized(idx: Tensor, rows_by_rank: Tensor, first: int, experts: int) -> Tensor:
    """In place of a Triton kernel: local experts as those of all ranks, -1 where no row came."""
    row = torch.arange(idx.shape[0], device=idx.device).unsqueeze(1)
    valid = (idx >= 0) & (idx + first < experts) & (row < rows_by_rank[-1])
    return idx.copy_(torch.where(valid, idx + first, -1))


def _triton() -> dict[str, Any]:
    triton = importlib.import_module("triton")
    return {"triton": triton, "tl": importlib.import_module("triton.language")}
