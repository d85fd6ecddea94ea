"""Megatron-Core: its flex dispatcher with the DeepEP backend, forward and backward."""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from . import flows, stand_ins
from .harness import Case, Rank
from .layer import Shape, Tensor, expert

MOE = "megatron.core.transformer.moe"
IMPORTED = [f"{MOE}.{name}" for name in ("fused_a2a", "moe_utils", "token_dispatcher")]


def load(here: Rank) -> None:
    given: dict[str, dict[str, Any]] = {
        "megatron.core.utils": {
            "internal_api": stand_ins.decorator,
            "deprecated": stand_ins.decorator,
            "get_pg_size": lambda group: 1 if group is None else group.size(),
            "get_pg_rank": lambda group: 0 if group is None else group.rank(),
            "is_te_min_version": lambda _: False,
        },
        "megatron.core.jit": {"jit_fuser": stand_ins.decorator},
        "megatron.core.config": {"is_experimental_enabled": lambda: False},
        "megatron.core.extensions.transformer_engine": {"HAVE_TE": False},
        "megatron.core.transformer.custom_layers.batch_invariant_kernels": {
            "is_batch_invariant_mode_enabled": lambda: False
        },
    }
    stand_ins.provide(here.source, ["megatron"], IMPORTED, given)


def cases() -> list[Case]:
    def case(name: str, **named: Any) -> Case:
        return Case(name, partial(_train, **named))

    return [
        case("async_finish=False", asynchronous=False, on_comm_stream=False),
        case("async_finish=True", asynchronous=True, on_comm_stream=False),
        case("async_finish, allocate_on_comm_stream", asynchronous=True, on_comm_stream=True),
        case("async_finish=False, 3 steps in flight", asynchronous=False, on_comm_stream=False, pipelined=True),
        case("async_finish=True, 3 steps in flight", asynchronous=True, on_comm_stream=True, pipelined=True),
        case("capacity factor: dropped choices", asynchronous=True, on_comm_stream=True, dropped=True),
        case("expert tensor parallelism of 2", asynchronous=True, on_comm_stream=True, tensor_parallel=2),
        Case("the buffer grows between forward and backward", _grown),
    ]


def _train(
    here: Rank,
    asynchronous: bool,
    on_comm_stream: bool,
    dropped: bool = False,
    pipelined: bool = False,
    tensor_parallel: int = 1,
) -> None:
    shape = here.shape()
    local = shape.experts // (here.ranks // tensor_parallel)
    part, columns = here.rank % tensor_parallel, shape.inner // tensor_parallel
    share = flows.Experts(here.rank // tensor_parallel * local, local, part * columns, (part + 1) * columns)
    flags = {"async_finish": asynchronous, "allocate_on_comm_stream": on_comm_stream}
    flows.train(here, _layers(here, shape, flags, dropped, tensor_parallel), shape, share, dropped, pipelined)


def _grown(here: Rank) -> None:
    """Megatron has one buffer, and makes a larger one when it meets longer rows."""
    fused_a2a: Any = importlib.import_module(f"{MOE}.fused_a2a")
    fused_a2a._buffer = None
    flags = {"async_finish": True, "allocate_on_comm_stream": True}
    shapes = (here.shape(), here.shape(hidden=4 * here.hidden))
    flows.train_two(here, lambda shape: _layers(here, shape, flags), shapes)


def _layers(
    here: Rank, shape: Shape, flags: dict[str, bool], dropped: bool = False, tensor_parallel: int = 1
) -> flows.Moe:
    """A dispatcher for each layer."""
    nodes = here.ranks // tensor_parallel
    local = shape.experts // nodes
    first = here.rank // tensor_parallel * local
    config = SimpleNamespace(
        moe_flex_dispatcher_backend="deepep",
        moe_router_topk=shape.topk,
        num_moe_experts=shape.experts,
        moe_router_dtype="fp32",
        moe_expert_capacity_factor=1.0 if dropped else None,
        moe_permute_fusion=False,
        moe_flex_dispatcher_num_sms=None,
        moe_router_padding_for_quantization=False,
        use_transformer_engine_op_fuser=False,
        moe_use_grouped_tensor=False,
        fp8=None,
        fp4=None,
    )
    # Of the groups of the model only the ranks and sizes matter, and the one that holds all.
    groups = SimpleNamespace(
        ep=SimpleNamespace(size=lambda: nodes, rank=lambda: here.rank // tensor_parallel),
        expt_tp=SimpleNamespace(size=lambda: tensor_parallel, rank=lambda: here.rank % tensor_parallel),
        tp_ep=here.group,
    )
    made = importlib.import_module(f"{MOE}.token_dispatcher").MoEFlexTokenDispatcher
    dispatchers = [made(local, list(range(first, first + local)), config, groups) for _ in range(flows.LAYERS)]

    def moe(at: int, x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        dispatcher = dispatchers[at]
        # Megatron's routers give all experts' probabilities, and a map of those that were chosen.
        chosen, kept = topk_idx.clamp(min=0), weights * (topk_idx >= 0)
        probs = torch.zeros(x.shape[0], shape.experts, device=x.device).scatter_add(1, chosen, kept)
        rows, probs = dispatcher.dispatch_preprocess(x.unsqueeze(1), probs > 0, probs)
        rows, probs = dispatcher.token_dispatch(rows, probs, **flags)
        rows, counts, probs = dispatcher.dispatch_postprocess(rows, probs)
        pieces = zip(rows.split(counts.tolist()), probs.split(counts.tolist()), w1, w2, strict=True)
        rows = torch.cat([expert(row, one, two) * prob.unsqueeze(-1) for row, prob, one, two in pieces]).bfloat16()
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows), **flags)
        y: Tensor = dispatcher.combine_postprocess(rows)
        return y.squeeze(1)

    return moe
