"""What a case is and what it runs on, and how its results are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .layer import Shape

LIMIT = 0.02
"""Largest difference that passes, as a part of the largest value of what is compared: some roundings to bf16."""


@dataclass
class Rank:
    """What a case runs on."""

    rank: int
    """In its group."""
    ranks: int
    """Of its group."""
    device: torch.device
    group: Any
    """NCCL on GPUs, gloo on CPUs."""
    cpu_group: Any
    """The same ranks, always gloo."""
    source: Path
    """The folder that holds the framework's package."""
    tokens: int
    """The most that a rank has, where a case does not say."""
    hidden: int
    """Elements of a row, likewise."""
    differences: dict[str, float] = field(default_factory=dict)
    """The largest that were seen of each thing that was compared."""
    wrong: str = ""
    """What was compared first and is too far off. The case goes on, so that the other ranks need not wait for this one in vain."""

    def shape(self, **named: int) -> Shape:
        """Sizes of a case."""
        return Shape(self.ranks, **{"tokens": self.tokens, "hidden": self.hidden, **named})

    def compare(self, what: str, got: torch.Tensor | None, want: torch.Tensor, limit: float = LIMIT) -> None:
        """Notes how far ``got`` is from ``want``, and whether that is farther than ``limit``. None is a gradient of zeros."""
        got = torch.zeros_like(want) if got is None else got.detach().float()
        want = want.detach().float().to(got.device)
        if got.shape != want.shape:
            self.wrong = self.wrong or f"shape of {what} is {list(got.shape)}, expected: {list(want.shape)}"
            return
        if not want.numel():
            return
        difference = (got - want).abs().max().item() / max(want.abs().max().item(), 1e-6)
        # Not a number is no small difference.
        difference = difference if difference == difference else float("inf")
        self.differences[what] = max(self.differences.get(what, 0.0), difference)
        if difference > limit:
            told = f"{what} differs by {difference:.2g} of its largest value, allowed: {limit}"
            self.wrong = self.wrong or told


@dataclass
class Case:
    """One way in which a framework calls ``deep_ep``."""

    name: str
    run: Callable[[Rank], None]
