"""The fuzzer with two ranks: the same calls on both, with wrong arguments on one of them now and then, and signal handlers inside waits."""

from __future__ import annotations

import random
import signal
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from fuzz_calls import EXPERTS, HIDDEN, MOST, TOPK
from fuzz_values import Values
from moexpress import Communicator, errors

WRONG = 0.01
"""Share of arguments that are wrong, on one rank alone."""


class Pair:
    """One of two ranks. Which call comes next both draw alike, its arguments each for itself."""

    def __init__(self, seed: int, rank: int) -> None:
        self.both, self.values = random.Random(seed), Values(2 * seed + rank)
        self.local, self.rows = EXPERTS // 2, 2 * MOST
        self.communicator = self._make()
        self.normal: Any = None
        self.low: Any = None
        self.calls = [self.dispatch, self.redispatch, self.combine, self.low_dispatch, self.low_combine, self.halves]

    def _make(self) -> Communicator:
        sizes = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": MOST}
        return Communicator(**sizes, low_latency=True, device="cpu", timeout=1.0)

    def maybe(self, good: torch.Tensor) -> Any:
        return self.values.wrong(good) if self.values.chance(WRONG) else good

    def batch(self) -> tuple[Any, Any]:
        tokens = self.values.random.randrange(MOST + 1)
        choices = self.maybe(self.values.choices(tokens, TOPK, EXPERTS))
        return self.maybe(self.values.good(torch.bfloat16, (tokens, HIDDEN))), choices

    def dispatch(self) -> None:
        self.normal = self.communicator.dispatch(*self.batch())

    def redispatch(self) -> None:
        tokens = self.normal.handle.tokens
        x = self.maybe(self.values.good(torch.bfloat16, (tokens, HIDDEN)))
        assert bool((self.communicator.redispatch(x, self.normal.handle).x == 1).all()), "other rows came"

    def combine(self) -> None:
        y = self.maybe(self.values.good(torch.bfloat16, (self.normal.rows, HIDDEN)))
        sums = self.communicator.combine(y, self.normal.handle).x
        assert bool(((sums >= 0) & (sums <= 2)).all()), "other sums came"

    def low_dispatch(self) -> None:
        self.low = self.communicator.low_latency_dispatch(*self.batch())

    def results(self) -> tuple[Any, Any, Any]:
        y = self.maybe(self.values.good(torch.bfloat16, (self.local, self.rows, HIDDEN)))
        return y, self.low.handle, self.maybe(self.values.good(torch.float32, (self.low.handle.tokens, TOPK)))

    def low_combine(self) -> None:
        sums = self.communicator.low_latency_combine(*self.results())
        assert bool(((sums >= 0) & (sums <= TOPK)).all()), "other sums came"

    def halves(self) -> None:
        sent = self.communicator.send_dispatch(*self.batch())
        self.low = sent.receive()
        self.communicator.send_combine(*self.results()).receive()

    def inside(self, *_: object) -> None:
        """What a signal handler does, in a wait or between."""
        for look in (self.communicator.stats, lambda: self.communicator.mask):
            with suppress(errors.Busy):
                look()

    def step(self) -> str:
        """One call; what became of it."""
        self.values.begin()
        call = self.both.choice(self.calls)
        if (self.normal if call in self.calls[1:3] else self.low if call == self.low_combine else self) is None:
            call = self.dispatch if call in self.calls[1:3] else self.low_dispatch
        signal.signal(signal.SIGALRM, self.inside)
        signal.setitimer(signal.ITIMER_REAL, self.values.random.choice((0, 1e-5, 1e-4, 0.05)))
        try:
            call()
            return "returned"
        except errors.Error as error:
            return type(error).__name__
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.values.check()

    def again(self) -> None:
        """After one rank refused what the other did, both begin anew."""
        self.normal = self.low = None
        try:
            self.communicator.recover()
            answer = "recovered"
        except errors.Error as error:
            answer = type(error).__name__
        if told(answer) != ["recovered"] * 2:
            self.communicator.close()
            self.communicator = self._make()


def told(answer: str) -> list[Any]:
    """What both ranks say."""
    answers: list[Any] = [None, None]
    dist.all_gather_object(answers, answer)
    return answers


def check(rank: int, world: int, seed: int, calls: int) -> dict[str, int]:
    """Makes ``calls`` calls; how many ended how."""
    pair, ends = Pair(seed, rank), dict[str, int]()
    for _ in range(calls):
        answers = told(pair.step())
        ends[answers[rank]] = ends.get(answers[rank], 0) + 1
        if answers != ["returned"] * 2:
            pair.again()
    pair.communicator.close()
    return ends
