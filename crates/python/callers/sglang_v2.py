"""SGLang: its DeepEP V2 dispatcher, for prefill (expanded or compact rows, counts on the host) and for decode (expanded rows, counts on the device)."""

from __future__ import annotations

import importlib
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from . import flows, layer, sglang, stand_ins
from .harness import Case, Rank
from .layer import Shape, Tensor
from .sglang import ALIGNMENT, MOE, gemm, setting, state

V2 = f"{MOE}.token_dispatcher.deepep_v2"
IMPORTED = [V2, f"{MOE}.token_dispatcher.base", f"{MOE}.utils"]

moe_flags = SimpleNamespace(deepep_v2_mode="direct")
environ: Any = None
"""SGLang's environment variables."""


def load(here: Rank) -> None:
    global environ
    if not stand_ins.file_of(here.source, V2).is_file():
        raise RuntimeError(f"{V2} is not in this checkout: take one with V2, such as 0.5.23")
    given = sglang.given(here)
    environ = given["sglang.srt.environ"]["envs"]
    gemm["DEEPGEMM_NEED_TMA_ALIGNED_SCALES"] = False
    # Ranks have batches of their own.
    parallel = SimpleNamespace(attn_dp_size=here.ranks, attn_cp_size=1, tp_size=here.ranks, tp_group=None)
    given["sglang.srt.runtime_context"] |= {
        "get_exec": lambda: SimpleNamespace(moe=moe_flags),
        "get_parallel": lambda: parallel,
    }
    stand_ins.provide(here.source, ["sglang"], IMPORTED, given)
    logging.getLogger("sglang").setLevel(logging.ERROR)


def cases() -> list[Case]:
    def case(name: str, **named: Any) -> Case:
        return Case(name, partial(_serve, **named))

    return [
        case("prefill, expanded"),
        case("prefill, expanded, FP8", fp8=True),
        case("prefill, expanded, FP8, UE8M0 scales", fp8=True, ue8m0=True),
        case("prefill, expanded, dropped choices", dropped=True),
        case("prefill, compact", expand=False),
        case("prefill, compact, FP8", expand=False, fp8=True),
        case("prefill, compact, FP8, scales by columns", expand=False, fp8=True, columns=True),
        case("prefill, compact, FP8, UE8M0 scales", expand=False, fp8=True, ue8m0=True),
        case("prefill, compact, MXFP8", expand=False, fp8=True, ue8m0=True, block=32),
        case("prefill, compact, dropped choices", expand=False, dropped=True),
        case("decode", phases="d"),
        case("decode, FP8", phases="d", fp8=True),
        case("decode, FP8, UE8M0 scales", phases="d", fp8=True, ue8m0=True),
        case("decode, MXFP8", phases="d", fp8=True, ue8m0=True, block=32),
        case("decode, dropped choices", phases="d", dropped=True),
        case("prefill and decode in turns", phases="pd"),
        case("prefill and decode in turns, hybrid, 16 SMs", phases="pd", mode="hybrid", multiprocessors=16),
        Case("one model after the other: another buffer", _replaced),
    ]


def _serve(
    here: Rank,
    phases: str = "p",
    expand: bool = True,
    fp8: bool = False,
    ue8m0: bool = False,
    columns: bool = False,
    block: int = 128,
    mode: str = "direct",
    multiprocessors: int = 0,
    dropped: bool = False,
    hidden: int = 0,
) -> None:
    shape = here.shape(hidden=hidden or max(here.hidden, 1024))
    v2 = importlib.import_module(V2)
    wrapper: Any = importlib.import_module("sglang.srt.layers.deep_gemm_wrapper")
    wrapper.DEEPGEMM_BLACKWELL = wrapper.DEEPGEMM_SCALE_UE8M0 = ue8m0
    wrapper.DEEPGEMM_NEED_TMA_ALIGNED_SCALES = columns
    moe_flags.deepep_v2_mode = mode
    environ.SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK = setting(shape.tokens)
    environ.SGLANG_DEEPEP_V2_NUM_SMS = setting(multiprocessors)
    environ.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND = setting(expand)

    def made() -> Any:
        return v2.DeepEPv2Dispatcher(
            group=here.group,
            router_topk=shape.topk,
            num_experts=shape.experts,
            num_local_experts=shape.local,
            hidden_size=shape.hidden,
            params_dtype=torch.bfloat16,
            use_fp8_dispatch=fp8,
            activation_scale_block_size=block,
        )

    dispatchers = [made() for _ in range(flows.LAYERS)]
    # The others find its buffer.
    dispatchers[0].prebuild()

    def moe(at: int, x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        state.prefill = phases[at % len(phases)] == "p"
        # SGLang's routers give int32.
        chosen = SimpleNamespace(topk_ids=topk_idx.int(), topk_weights=weights)
        got = dispatchers[at].dispatch(x, chosen)
        if got.is_expanded != (expand or not state.prefill) or got.use_masked_gemm == state.prefill:
            raise AssertionError(f"expanded is {got.is_expanded} and masked {got.use_masked_gemm}")
        if (got.hidden_states_scale is not None) != fp8:
            raise AssertionError(f"FP8 was {'' if fp8 else 'not '}asked for")
        results = (_by_expert if got.is_expanded else _by_row)(got, shape, w1, w2)
        y: Tensor = dispatchers[at].combine(v2.DeepEPv2CombineInput(*results))
        return y

    there_and_back = partial(layer.fp8_there_and_back, power_of_two=ue8m0, block=block) if fp8 else None
    flows.serve(here, moe, shape, dropped=dropped, there_and_back=there_and_back)


def _replaced(here: Rank) -> None:
    """SGLang has one buffer, and makes another where sizes or types are others."""
    hidden = max(here.hidden, 1024)
    _serve(here, phases="pd", hidden=hidden)
    _serve(here, phases="pd", hidden=2 * hidden, fp8=True)
    _serve(here, phases="pd", hidden=hidden)


def _rows(got: Any) -> Tensor:
    rows: Tensor = got.hidden_states
    return rows if got.hidden_states_scale is None else layer.from_fp8(rows, got.hidden_states_scale)


def _by_expert(got: Any, shape: Shape, w1: Tensor, w2: Tensor) -> tuple[Tensor, None]:
    """What the experts make of rows by expert, weighted: each expert's begin at a multiple of the alignment behind those of the one before,
    and end where ``psum`` says."""
    rows, ends = _rows(got), got.psum_num_recv_tokens_per_expert.tolist()
    # Nothing is read between the rows that came.
    results = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16, device=rows.device)
    begin = 0
    for number, end in enumerate(ends):
        if got.use_masked_gemm and end - begin > got.masked_max_m:
            raise AssertionError(f"rows of an expert are {end - begin}, expected: at most {got.masked_max_m}")
        part = layer.expert(rows[begin:end], w1[number], w2[number]) * got.topk_weights[begin:end, None]
        results[begin:end] = part.bfloat16()
        begin = _aligned(end)
    if rows.shape[0] < begin or (not got.use_masked_gemm and rows.shape[0] != begin):
        raise AssertionError(f"there is room for {rows.shape[0]} rows, expected: {begin}")
    return results, None


def _by_row(got: Any, shape: Shape, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """What the experts make of received rows, weighted and summed."""
    idx, ends = got.topk_ids, got.psum_num_recv_tokens_per_expert.tolist()
    expected, end = [], 0
    for count in torch.bincount(idx[idx >= 0], minlength=shape.local).tolist():
        end += _aligned(count)
        expected.append(end)
    if ends != expected:
        raise AssertionError(f"rows up to each expert are {ends}, expected: {expected}")
    return layer.rowwise(_rows(got), idx, got.topk_weights, w1, w2), got.topk_weights


def _aligned(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT
