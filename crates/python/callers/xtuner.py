"""xtuner: its dispatcher and its operators with DeepEP, forward and backward. The handle goes through ``save_for_backward``."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from . import flows, stand_ins
from .harness import Case, Rank
from .layer import Tensor, expert

OPS = "xtuner.v1.ops.comm.deepep_op"
DISPATCHER = "xtuner.v1.module.dispatcher.deepep"
IMPORTED = [OPS, DISPATCHER, "xtuner.v1.module.dispatcher.base"]


def load(here: Rank) -> None:
    given: dict[str, dict[str, Any]] = {
        "xtuner.v1.utils": {
            "get_logger": lambda: logging.getLogger("xtuner"),
            "get_device": lambda: here.device.type,
            "copy_method_signature": lambda _: stand_ins.decorator,
        },
        "xtuner.v1.ops": {"permute": permute, "unpermute": unpermute},
        "xtuner.v1.module.dispatcher": {"XTUNER_DISPATCHER_DEBUG": False},
        "mmengine.utils": {"is_installed": lambda name: importlib.util.find_spec(name) is not None},
    }
    stand_ins.provide(here.source, ["xtuner", "mmengine"], IMPORTED, given)
    if here.device.type == "cpu":
        dispatcher: Any = importlib.import_module(DISPATCHER)
        dispatcher.torch = _Unpinned()


def cases() -> list[Case]:
    return [
        Case("dispatcher, async_op=False", partial(_dispatcher, async_op=False)),
        Case("dispatcher, async_op=True", partial(_dispatcher, async_op=True)),
        Case("dispatcher, async_op=False, 3 steps in flight", partial(_dispatcher, async_op=False, pipelined=True)),
        Case("dispatcher, async_op=True, 3 steps in flight", partial(_dispatcher, async_op=True, pipelined=True)),
        Case("dispatcher, expert tensor parallelism of 2", partial(_dispatcher, async_op=True, tensor_parallel=2)),
        Case("dispatcher, dropped choices", partial(_dispatcher, async_op=False, dropped=True)),
        Case("operators, forward", partial(_operators, events=False)),
        Case("operators, forward, with previous_event", partial(_operators, events=True)),
    ]


class _Unpinned:
    """``torch``, but for pinned memory, which needs a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *arguments: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        return torch.tensor(*arguments, **named)


def permute(x: Tensor, topk_idx: Tensor, num_out_tokens: int, num_negative_one_in_indices: int) -> tuple[Tensor, Any]:
    """In place of a CUDA kernel: a row for each local choice, by expert; and where it came from."""
    row, choice = (topk_idx >= 0).nonzero(as_tuple=True)
    order = torch.argsort(topk_idx[row, choice], stable=True)
    row, choice = row[order], choice[order]
    assert row.numel() == num_out_tokens == topk_idx.numel() - num_negative_one_in_indices
    return x[row], SimpleNamespace(row=row, choice=choice, rows=x.shape[0])


def unpermute(x: Tensor, origin: Any, probs: Tensor) -> Tensor:
    """In place of a CUDA kernel: the weighted sums of the rows that came from one."""
    sums = torch.zeros(origin.rows, x.shape[1], device=x.device)
    return sums.index_add(0, origin.row, x.float() * probs[origin.row, origin.choice, None]).to(x.dtype)


def _experts(rows: Tensor, counts: list[int], w1: Tensor, w2: Tensor) -> Tensor:
    return torch.cat([expert(row, *w) for row, *w in zip(rows.split(counts), w1, w2, strict=True)]).bfloat16()


class _Router(torch.autograd.Function):
    """What computes the weights; hooks of xtuner hang on it.

    With ``async_op`` xtuner waits for the gradient of ``x`` before that is used. For the gradient of the weights it waits only with expert
    tensor parallelism; its own comment there says what it reads otherwise: memory that is still being written, whatever ``deep_ep`` is. So
    this waits in its place.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor) -> Tensor:
        return weights * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if grad.is_cuda:
            torch.cuda.synchronize()
        return grad


def _dispatcher(here: Rank, async_op: bool, tensor_parallel: int = 1, **named: Any) -> None:
    shape = here.shape()
    local = shape.experts // (here.ranks // tensor_parallel)
    columns = shape.inner // tensor_parallel
    part = here.rank % tensor_parallel
    share = flows.Experts(here.rank // tensor_parallel * local, local, part * columns, (part + 1) * columns)
    _new_buffer()
    made = importlib.import_module(DISPATCHER).DeepEPDispatcher
    dispatchers = [
        made(n_routed_experts=shape.experts, process_group=here.group, tp_size=tensor_parallel)
        for _ in range(flows.LAYERS)
    ]

    def moe(at: int, x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        dispatcher, flag = dispatchers[at], {"async_op": async_op}
        weights = _Router.apply(weights)
        said: dict[str, Any] = {}
        said["pre_dispatched"] = dispatcher.dispatch_preprocess(
            hidden_states=x, topk_ids=topk_idx, topk_weights=weights, **flag
        )
        said["dispatched"] = dispatcher.dispatch(topk_weights=weights, **said, **flag)
        said["post_dispatched"] = post = dispatcher.dispatch_postprocess(**said, **flag)
        rows = _experts(post["hidden_states"], post["tokens_per_expert"].tolist(), w1, w2)
        said["pre_combined"] = dispatcher.combine_preprocess(hidden_states=rows, **said, **flag)
        said["combined"] = dispatcher.combine(**said, **flag)
        y: Tensor = dispatcher.combine_postprocess(**said, **flag)["hidden_states"]
        return y

    flows.train(here, moe, shape, share, **named)


def _operators(here: Rank, events: bool) -> None:
    # Only forward: at this commit the backward of xtuner's `deep_ep_combine` returns a gradient too few, whatever is beneath.
    shape = here.shape()
    _new_buffer()
    ops = importlib.import_module(OPS)

    def moe(at: int, x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        rows, idx, probs, counts, handle, event = ops.deep_ep_dispatch(
            x, topk_idx, weights, shape.experts, here.group, ops.buffer_capture() if events else None
        )
        event.current_stream_wait()
        rows, origin = permute(rows, idx, sum(counts), idx.numel() - sum(counts))
        rows = unpermute(_experts(rows, counts, w1, w2), origin, probs)
        y, event = ops.deep_ep_combine(
            rows, shape.experts, handle, here.group, ops.buffer_capture() if events else None
        )
        event.current_stream_wait()
        result: Tensor = y
        return result

    flows.serve(here, moe, shape)


def _new_buffer() -> None:
    """xtuner keeps one buffer and refuses other sizes: cases are models of their own."""
    ops: Any = importlib.import_module(OPS)
    ops._buffer = None
