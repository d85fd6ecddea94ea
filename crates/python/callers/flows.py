"""What all drivers do with a framework's layer: serve some steps, or train some, and compare with one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import layer
from .harness import LIMIT, Rank
from .layer import Shape, Tensor

LAYERS, STEPS = 3, 3
FP8_LIMIT = 0.04
"""Largest difference that passes where rows travel as FP8: a rounding to bf16 before may change a code, by an eighth of its value."""

Moe = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""``moe(layer, x, topk_idx, weights, w1, w2)`` with bf16 ``[tokens, hidden]`` and the local experts' weights: the sum of the experts' results
for each token, ``[tokens, hidden]``."""


@dataclass
class Experts:
    """The part of the experts' weights that a rank holds."""

    first: int
    """Its first expert."""
    count: int
    begin: int = 0
    """Its first column of ``w1``, which is its first row of ``w2``."""
    end: int | None = None

    def of(self, weights: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Its slices of all experts' weights."""
        here, columns = slice(self.first, self.first + self.count), slice(self.begin, self.end)
        return weights[0][here, :, columns], weights[1][here, columns]


def all_local(shape: Shape, rank: int) -> Experts:
    """An equal share of the experts for each rank."""
    return Experts(rank * shape.local, shape.local)


class Step:
    """A batch through all layers on this rank and, when it is compared, in one process."""

    def __init__(self, here: Rank, shape: Shape, number: int, share: Experts, dropped: bool) -> None:
        self.here, self.shape, self.share = here, shape, share
        counts = layer.tokens(shape, number)
        self.begin = sum(counts[: here.rank])
        self.end = self.begin + counts[here.rank]
        self.rows = [layer.rows(shape, number, rank, count) for rank, count in enumerate(counts)]
        self.routing = [
            [layer.routing(shape, number, at, rank, count, dropped) for rank, count in enumerate(counts)]
            for at in range(LAYERS)
        ]
        g = layer.generator(4, number)
        self.grad = torch.randn(sum(counts), shape.hidden, generator=g)
        self.experts = [layer.experts(shape, at) for at in range(LAYERS)]

    def forward(self, moe: Moe, grad: bool) -> None:
        """On this rank."""

        def here(tensor: Tensor) -> Tensor:
            return tensor.to(self.here.device).contiguous().requires_grad_(grad and tensor.is_floating_point())

        self.x = here(self.rows[self.here.rank].clone())
        self.weights, self.w = [], []
        h = self.x
        for at in range(LAYERS):
            routing = self.routing[at][self.here.rank]
            weights, idx = here(routing.weights.clone()), here(routing.topk_idx)
            w1, w2 = (here(w.clone()) for w in self.share.of(self.experts[at]))
            self.weights.append(weights)
            self.w.append((w1, w2))
            h = h + moe(at, h.bfloat16(), idx, weights, w1, w2).float()
        self.out = h

    def backward(self) -> None:
        """On this rank."""
        (self.out * self.grad[self.begin : self.end].to(self.out.device)).sum().backward()

    def compare(self, grad: bool, there_and_back: Callable[[Tensor], Tensor] | None, limit: float) -> None:
        """With one process."""

        def whole(tensor: Tensor) -> Tensor:
            return tensor.to(self.here.device, copy=True).requires_grad_(grad)

        x = whole(torch.cat(self.rows))
        weights = [whole(torch.cat([r.weights for r in at])) for at in self.routing]
        idx = [torch.cat([r.topk_idx for r in at]).to(self.here.device) for at in self.routing]
        w = [(whole(one), whole(two)) for one, two in self.experts]
        h = x
        for at in range(LAYERS):
            sent = h if there_and_back is None else there_and_back(h.detach().bfloat16())
            h = h + layer.plain(sent, idx[at], weights[at], *w[at])
        mine, compare = slice(self.begin, self.end), self.here.compare
        compare("output", self.out, h[mine], limit)
        if not grad:
            return
        (h * self.grad.to(h.device)).sum().backward()
        compare("gradient of x", self.x.grad, _grad(x)[mine], limit)
        for at in range(LAYERS):
            compare("gradient of weights", self.weights[at].grad, _grad(weights[at])[mine], limit)
            want1, want2 = self.share.of((_grad(w[at][0]), _grad(w[at][1])))
            compare("gradient of w1", self.w[at][0].grad, want1, limit)
            compare("gradient of w2", self.w[at][1].grad, want2, limit)


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def train(
    here: Rank,
    moe: Moe,
    shape: Shape,
    share: Experts | None = None,
    dropped: bool = False,
    pipelined: bool = False,
    limit: float = LIMIT,
) -> None:
    """Forward and backward of some steps; outputs and all gradients are compared.

    Args:
        pipelined: all steps go forward before the first one goes back, so that the results of nine layers are alive.
    """
    share = share or all_local(shape, here.rank)
    steps = [Step(here, shape, number, share, dropped) for number in range(STEPS)]
    for step in steps if pipelined else ():
        step.forward(moe, grad=True)
    for step in steps:
        if not pipelined:
            step.forward(moe, grad=True)
        step.backward()
        step.compare(True, None, limit)


def train_two(here: Rank, made: Callable[[Shape], Moe], shapes: tuple[Shape, Shape]) -> None:
    """Two models go forward one after the other, then back in the same order: what the second needs may be made between the first one's
    forward and its backward.

    Args:
        made: makes a model's layers.
    """
    both = [Step(here, shape, 0, all_local(shape, here.rank), False) for shape in shapes]
    for step in both:
        step.forward(made(step.shape), grad=True)
    for step in both:
        step.backward()
        step.compare(True, None, LIMIT)


def serve(
    here: Rank,
    moe: Moe,
    shape: Shape,
    dropped: bool = False,
    there_and_back: Callable[[Tensor], Tensor] | None = None,
    limit: float | None = None,
) -> None:
    """Forward of some steps; outputs are compared.

    Args:
        there_and_back: what the row format leaves of the rows that are sent.
    """
    share = all_local(shape, here.rank)
    limit = limit or (LIMIT if there_and_back is None else FP8_LIMIT)
    for number in range(STEPS):
        step = Step(here, shape, number, share, dropped)
        with torch.inference_mode():
            step.forward(moe, grad=False)
            step.compare(False, there_and_back, limit)
