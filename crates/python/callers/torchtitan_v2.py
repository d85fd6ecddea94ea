"""torchtitan: its token dispatcher and operators of DeepEP V2, forward and backward, and its expanded layout for serving."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from . import flows, stand_ins
from .harness import Case, Rank
from .layer import Shape, Tensor, expert

DEEPEP = "torchtitan.distributed.deepep.deepep"
DISPATCHER = "torchtitan.models.common.token_dispatcher"
IMPORTED = [DEEPEP, DISPATCHER]


class _Configurable:
    """The base of what has a ``Config``."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        pass


def load(here: Rank) -> None:
    given: dict[str, dict[str, Any]] = {"torchtitan.config": {"Configurable": _Configurable}}
    stand_ins.provide(here.source, ["torchtitan"], IMPORTED, given)
    # PyTorch takes it, too, where it finds one.
    absent = importlib.util.find_spec("spmd_types") is None
    if absent:
        sys.modules["spmd_types"] = ModuleType("spmd_types")
    importlib.import_module(DISPATCHER)
    if absent:
        del sys.modules["spmd_types"]
    deepep = importlib.import_module(DEEPEP)
    if not hasattr(deepep, "ElasticBuffer"):
        raise RuntimeError(f"{DEEPEP} is not of V2: take a commit of 756213e15 (June 2026) or later")
    if here.device.type == "cpu":
        # Its operators are registered for CUDA tensors only.
        torch.library.impl(deepep._lib, "dispatch", "CPU")(deepep._dispatch_op_impl)
        torch.library.impl(deepep._lib, "combine", "CPU")(deepep._combine_op_impl)


def cases() -> list[Case]:
    return [
        Case("train", partial(_run)),
        Case("train, 3 steps in flight", partial(_run, pipelined=True)),
        Case("train, scores of zero: dropped choices", partial(_run, dropped=True)),
        Case("train, activation checkpointing", partial(_run, recompute=True)),
        Case("inference_mode, compact", partial(_serve, expand=False)),
        Case("inference_mode, expanded", partial(_serve, expand=True)),
        Case("token dispatcher, train", partial(_run, dispatcher=True)),
        Case("token dispatcher, train, 3 steps in flight", partial(_run, dispatcher=True, pipelined=True)),
        Case("token dispatcher, inference_mode, compact", partial(_serve, expand=False, dispatcher=True)),
        Case("token dispatcher, inference_mode, expanded", partial(_serve, expand=True, dispatcher=True)),
        Case("the buffer grows between forward and backward", _grown),
    ]


def _run(here: Rank, recompute: bool = False, dispatcher: bool = False, **named: Any) -> None:
    shape = here.shape()
    moe = (_dispatched if dispatcher else _layers)(here, False, shape)

    def recomputed(*arguments: Any) -> Tensor:
        y: Tensor = checkpoint(moe, *arguments, use_reentrant=False)
        return y

    flows.train(here, recomputed if recompute else moe, shape, **named)


def _serve(here: Rank, expand: bool, dispatcher: bool = False) -> None:
    deepep: Any = importlib.import_module(DEEPEP)
    shape, before = here.shape(), len(deepep._handle_cache)
    flows.serve(here, (_dispatched if dispatcher else _layers)(here, expand, shape), shape)
    if len(deepep._handle_cache) != before:
        raise AssertionError(f"{len(deepep._handle_cache)} handles are kept, expected: {before}")


def _grown(here: Rank) -> None:
    """torchtitan has one buffer, and makes a larger one when it meets longer rows."""
    deepep: Any = importlib.import_module(DEEPEP)
    deepep._buffer = None
    flows.train_two(here, partial(_layers, here, False), (here.shape(), here.shape(hidden=4 * here.hidden)))


def _layers(here: Rank, expand: bool, shape: Shape) -> flows.Moe:
    deepep: Any = importlib.import_module(DEEPEP)
    deepep.get_buffer(here.group, hidden=shape.hidden, num_max_tokens_per_rank=shape.tokens, num_topk=shape.topk)

    def moe(at: int, x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        # What is dropped is told by its score alone.
        rows, counts, state = deepep.dispatch_tokens(
            x,
            topk_idx.clamp(min=0),
            weights,
            shape.local,
            shape.experts,
            num_tokens_per_rank=shape.tokens,
            cudagraphable=expand,
        )
        y: Tensor = deepep.combine_tokens(_experts(rows, counts, w1, w2), state)
        deepep.sync_combine()
        return y

    return moe


def _dispatched(here: Rank, expand: bool, shape: Shape) -> flows.Moe:
    """Layers that a token dispatcher serves. All ranks pad their tokens to the same number, as torchtitan does; scores of padding are zero."""
    made = importlib.import_module(DISPATCHER).DeepEPTokenDispatcher
    dispatcher = made(
        made.Config(
            num_experts=shape.experts,
            top_k=shape.topk,
            cudagraphable=expand,
            num_max_tokens_per_rank=shape.tokens,
            hidden_dim=shape.hidden,
        )
    )
    dispatcher.wire_meshes(ep_mesh=SimpleNamespace(get_group=lambda: here.group))

    def moe(at: int, x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        def padded(tensor: Tensor) -> Tensor:
            return torch.nn.functional.pad(tensor, (0, 0, 0, shape.tokens - tensor.shape[0]))

        idx = padded(topk_idx.clamp(min=0))
        there = torch.bincount(idx.reshape(-1), minlength=shape.experts)
        rows, counts, told = dispatcher.dispatch(padded(x), padded(weights), idx, there)
        y: Tensor = dispatcher.combine(_experts(rows, counts, w1, w2), told, x)
        return y[: x.shape[0]]

    return moe


def _experts(rows: Tensor, counts: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """bf16 results of rows by expert. Expanded, there is room for more rows than came: nothing is read there."""
    sizes = counts.tolist()
    pieces = zip(rows[: sum(sizes)].split(sizes), w1, w2, strict=True)
    results = torch.cat([expert(row, one, two) for row, one, two in pieces]).bfloat16()
    return torch.cat([results, results.new_full((len(rows) - len(results), rows.shape[1]), float("nan"))])
