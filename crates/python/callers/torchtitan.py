"""torchtitan: the operators of its DeepEP code of V1, forward and backward."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from . import flows, stand_ins
from .harness import Case, Rank
from .layer import Shape, Tensor, expert

DEEPEP = "torchtitan.distributed.deepep.deepep"
IMPORTED = [DEEPEP]


def load(here: Rank) -> None:
    stand_ins.provide(here.source, ["torchtitan"], IMPORTED)
    deepep = importlib.import_module(DEEPEP)
    if not hasattr(deepep, "combine_tokens") or not hasattr(deepep, "_dispatch_op_impl"):
        raise RuntimeError(f"{DEEPEP} is not of V1: take a commit before 756213e15 (June 2026)")
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
        Case("inference_mode", partial(_run, inference=True)),
        Case("the buffer grows between forward and backward", _grown),
    ]


def _run(here: Rank, inference: bool = False, recompute: bool = False, **named: Any) -> None:
    shape = here.shape()
    moe = _layers(here, shape)

    def recomputed(*arguments: Any) -> Tensor:
        y: Tensor = checkpoint(moe, *arguments, use_reentrant=False)
        return y

    if inference:
        deepep = importlib.import_module(DEEPEP)
        # Activation checkpointing leaves handles behind: torchtitan's affair.
        before = len(deepep._handle_cache)
        flows.serve(here, moe, shape)
        if len(deepep._handle_cache) != before:
            raise AssertionError(f"{len(deepep._handle_cache)} handles are kept, expected: {before}")
    else:
        flows.train(here, recomputed if recompute else moe, shape, **named)


def _grown(here: Rank) -> None:
    """torchtitan has one buffer, and makes a larger one when it meets longer rows."""
    deepep: Any = importlib.import_module(DEEPEP)
    deepep._buffer = None
    flows.train_two(here, partial(_layers, here), (here.shape(), here.shape(hidden=4 * here.hidden)))


def _layers(here: Rank, shape: Shape) -> flows.Moe:
    deepep = importlib.import_module(DEEPEP)

    def moe(at: int, x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        # What is dropped is told by its score alone.
        rows, counts, state = deepep.dispatch_tokens(
            x, topk_idx.clamp(min=0), weights, shape.local, shape.experts, here.group
        )
        pieces = zip(rows.split(counts.tolist()), w1, w2, strict=True)
        rows = torch.cat([expert(row, one, two) for row, one, two in pieces]).bfloat16()
        y: Tensor = deepep.combine_tokens(rows, state)
        deepep.sync_combine()
        return y

    return moe
