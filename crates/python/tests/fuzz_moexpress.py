"""Every public call of `moexpress`, with drawn arguments, on what earlier calls left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import moexpress
import torch
import torch.distributed as dist
from fuzz_calls import EXPERTS, HIDDEN, MOST, TOPK, Call, Calls, Kept
from fuzz_values import Values
from moexpress import Communicator, autograd, errors


class OfMoexpress(Calls):
    """A rank alone, with three communicators."""

    documented = (errors.Error,)

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self.meeting = moexpress.Meeting(dist.group.WORLD, timeout=5)
        self.communicators = [self._make(index) for index in range(4)]
        self.handles, self.low, self.pending, self.received = Kept(16), Kept(8), Kept(6), Kept(8)

    def close(self) -> None:
        for communicator in self.communicators:
            communicator.close()
        self.meeting.close()

    def all(self) -> list[Callable[[], Call]]:
        often = [self.dispatch, self.dispatch_members, self.redispatch, self.combine, self.gradients]
        low = [self.send_dispatch, self.receive, self.low_latency_dispatch, self.send_combine, self.low_latency_combine]
        return often * 4 + low * 4 + [self.look] * 4 + [self.met, self.forget]

    def slow(self) -> list[Callable[[], Call]]:
        return [self.made, self.closed, self.ranks, self.ranks]

    def _make(self, index: int) -> Communicator:
        settings: dict[str, Any] = [
            {"low_latency": True},
            {"low_latency": True, "element": "fp8"},
            {"placement": "ring", "slots": 2},
            {"placement": "pulled", "channels": 2, "slots": 2},
        ][index]
        sizes = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": MOST, "arena_bytes": 1 << 20}
        return Communicator(self.meeting, **sizes, device="cpu", timeout=5.0, **settings)

    def pick(self) -> Communicator:
        return self.random.choice(self.communicators)

    def batch(self, of: Communicator) -> dict[str, Any]:
        """Rows as they travel, with scales."""
        tokens = self.tokens()
        if of.element == "bf16":
            return {"x": self.maybe(self.rows(tokens))}
        scales = self.values.good(torch.float32, (tokens, 1))
        return {"x": self.maybe(self.rows(tokens, torch.float8_e4m3fn)), "scales": self.maybe(scales)}

    def of_tokens(self, x: Any) -> int:
        return (
            x.shape[0] if isinstance(x, torch.Tensor) and not x.is_nested and x.dim() > 0 and x.shape[0] < 99 else MOST
        )

    def weights(self, rows: int) -> Any:
        return self.maybe(self.values.good(torch.float32, (rows, TOPK))) if self.values.chance(0.6) else None

    def dispatch(self) -> Call:
        of = self.pick()
        batch = self.batch(of)
        tokens = self.of_tokens(batch["x"])
        batch |= {
            "topk_idx": self.maybe(self.values.choices(tokens, TOPK, EXPERTS)),
            "topk_weights": self.weights(tokens),
        }
        if self.values.chance(0.3):
            batch |= {"alignment": self.number(1, 2, 128), "worst_rows": self.number(0, MOST), "device_counts": False}
        if self.values.chance(0.05):
            batch["device_counts"] = self.number(True, False)

        def call() -> None:
            received = of.dispatch(**batch)
            self.handles.add(received.handle)
            self.received.add(received)
            keep = (batch["topk_idx"] != -1).any(dim=1)
            sent = batch["x"].detach()[keep]
            came = received.x[: sent.shape[0]]
            equal = torch.equal(sent.contiguous().view(torch.uint8), came.contiguous().view(torch.uint8))
            assert equal, f"other rows came for {batch}"
            self.clean(received.x)

        return call

    def dispatch_members(self) -> Call:
        of = self.pick()
        batch = self.batch(of)
        tokens = self.of_tokens(batch["x"])
        batch |= {
            "in_rank": self.maybe(self.values.good(torch.bool, (tokens, 1))),
            "tokens_per_expert": self.number(
                [tokens] * EXPERTS, [0] * EXPERTS, [tokens] * (EXPERTS - 1), [-1] * EXPERTS
            ),
        }
        if self.values.chance(0.3):
            batch |= {"alignment": self.number(1, 2), "worst_rows": self.number(0, MOST)}

        def call() -> None:
            received = of.dispatch_members(**batch)
            self.handles.add(received.handle)
            self.received.add(received)
            self.clean(received.x)

        return call

    def handle(self) -> Any:
        return self.one(self.handles, self.one(self.low, self.number(None)))

    def redispatch(self) -> Call:
        of, handle = self.pick(), self.handle()
        batch = self.batch(of)
        if hasattr(handle, "rows") and not self.values.chance(0.3):
            bf16 = of.element == "bf16"
            batch["x"] = self.maybe(self.rows(handle.tokens, torch.bfloat16 if bf16 else torch.float8_e4m3fn))
            if not bf16:
                batch["scales"] = self.maybe(self.values.good(torch.float32, (handle.tokens, 1)))
        return lambda: self.clean(of.redispatch(handle=handle, **batch).x)

    def combine(self) -> Call:
        of, handle = self.pick(), self.handle()
        # A low-latency handle knows its rows only where their counts came to the host.
        rows, tokens = getattr(handle, "rows", None), getattr(handle, "tokens", MOST)
        rows = MOST if rows is None else rows
        y = self.one([each for each in self.tensors if each.dim() == 2], self.maybe(self.rows(rows)))
        if self.values.chance(0.7):
            y = self.maybe(self.rows(rows))
        bias: Any = [None, None, self.maybe(self.rows(tokens)), (self.rows(tokens), self.maybe(self.rows(tokens))), 3]
        bias = self.random.choice(bias)
        weights = self.weights(rows)
        return lambda: self.clean(of.combine(y, handle, topk_weights=weights, bias=bias).x)

    def gradients(self) -> Call:
        of, tokens = self.communicators[0], self.tokens()
        x, idx = self.maybe(self.rows(tokens)), self.maybe(self.values.choices(tokens, TOPK, EXPERTS))
        weights = self.maybe(self.values.good(torch.float32, (tokens, TOPK)))
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.is_leaf and self.values.chance(0.5):
            x.requires_grad_()

        def call() -> None:
            with torch.enable_grad():
                received = autograd.dispatch(of, x, idx, weights)
                sums = autograd.combine(of, received.x, received.handle)
                if sums.requires_grad:
                    sums.sum().backward()
            self.clean(sums)

        return call

    # Low latency.

    def low_batch(self) -> tuple[Any, Any, Any]:
        tokens = self.tokens()
        idx = self.maybe(self.values.choices(tokens, TOPK, EXPERTS))
        weights = self.weights(tokens) if self.values.chance(0.3) else None
        return self.maybe(self.rows(tokens)), idx, weights

    def send_dispatch(self) -> Call:
        of, (x, idx, weights) = self.pick(), self.low_batch()
        stats = self.maybe(self.values.good(torch.int32, (EXPERTS,), 0)) if self.values.chance(0.3) else None

        def call() -> None:
            sent = of.send_dispatch(x, idx, weights) if stats is None else self.with_stats(of, x, idx, weights, stats)
            self.pending.add(sent)
            if self.values.chance(0.3):
                self.changed(self.random.choice((x, idx, weights, stats)))

        return call

    def with_stats(self, of: Communicator, *arguments: Any) -> Any:
        """As `deep_ep` sends it."""
        return of.in_low_latency.send_dispatch(*arguments)

    def low_latency_dispatch(self) -> Call:
        of, (x, idx, weights) = self.pick(), self.low_batch()

        def call() -> None:
            received = of.low_latency_dispatch(x, idx, weights)
            self.low.add(received.handle)
            self.clean(received.x)

        return call

    def results(self) -> tuple[Any, Any, Any, Any]:
        handle = self.one(self.low, self.one(self.handles, self.number(None)))
        tokens = getattr(handle, "tokens", MOST)
        y = self.maybe(self.values.good(torch.bfloat16, (EXPERTS, MOST, HIDDEN)))
        weights = self.maybe(self.values.good(torch.float32, (tokens, TOPK))) if self.values.chance(0.8) else None
        return y, handle, weights, self.maybe(self.rows(tokens)) if self.values.chance(0.5) else None

    def send_combine(self) -> Call:
        of, (y, handle, weights, out) = self.pick(), self.results()

        def call() -> None:
            sent = of.send_combine(y, handle, weights, out=out)
            self.pending.add(sent)
            if self.values.chance(0.3):
                self.changed(self.random.choice((y, weights, sent.result)))

        return call

    def low_latency_combine(self) -> Call:
        of, (y, handle, weights, out) = self.pick(), self.results()
        return lambda: self.clean(of.low_latency_combine(y, handle, weights, out=out))

    def receive(self) -> Call:
        sent = self.random.choice(self.pending) if self.pending else None

        def call() -> None:
            if sent is None:
                return
            got = sent.receive()
            if isinstance(got, torch.Tensor):
                self.clean(got)
            else:
                self.low.add(got.handle)
                self.clean(got.x)

        return call

    # The rest.

    def look(self) -> Call:
        """What was received, a handle, and what a communicator says of itself."""
        of, received, sent = self.pick(), self.one(self.received, None), self.one(self.pending, None)
        names = ("mask", "low_latency_mask", "window_bytes", "rank", "ranks", "device")

        def call() -> None:
            of.stats()
            for name in names:
                getattr(of, name)
            for each in (received, getattr(sent, "result", None)):
                for name in ("x", "scales", "topk_idx", "topk_weights", "source_token", "source_rank", "device_counts"):
                    got = getattr(each, name, None)
                    if isinstance(got, torch.Tensor) and got.untyped_storage().nbytes():
                        got.clone()
            handle = getattr(received, "handle", None)
            if handle is not None:
                repr((handle.rows, handle.tokens, handle.generation, received.expert_counts))

        return call

    def ranks(self) -> Call:
        of = self.pick()
        mask = self.number([], [], (), [0], [1], [-1], [0, 0])
        return self.random.choice((of.rejoin, lambda: of.mask_rank(self.number(0, 1, -1)), lambda: of.recover(mask)))

    def met(self) -> Call:
        meeting = self.meeting
        told = self.number(b"", b"told", "told", bytearray(3))
        return self.random.choice((meeting.barrier, lambda: meeting.all_gather(told), meeting.lost))

    def forget(self) -> Call:
        """Operations that nobody will receive, handles, tensors."""
        kept = self.random.choice((self.handles, self.low, self.pending, self.received, self.tensors))

        def call() -> None:
            kept.clear()
            gc.collect(0)

        return call

    def made(self) -> Call:
        """Another communicator, of drawn sizes."""
        sizes = {
            "experts": self.number(EXPERTS, 1, 3),
            "topk": self.number(TOPK, 1),
            "hidden": self.number(HIDDEN, 1, 65536),
            "max_tokens": self.number(MOST, 1),
            "element": self.number("bf16", "fp8", "fp8-pow2", "fp8-ue8m0", "fp4"),
            "low_latency": self.number(True, False),
            "placement": self.number("direct", "ring", "pulled", "heap"),
            "arena_bytes": self.number(None, 0, 1 << 16),
            "timeout": self.number(5.0, 5),
            "channels": self.number(None, 1, 2),
            "slots": self.number(None, 1, 4),
            "multiprocessors": self.number(None, 8),
            "device": self.number("cpu", "cpu", torch.device("cpu"), "meta", "cuda"),
        }
        group = self.number(self.meeting)

        def call() -> None:
            with Communicator(group, **sizes) as communicator:
                communicator.stats()

        return call

    def closed(self) -> Call:
        """A communicator is closed, used, and made anew."""
        index = self.random.randrange(len(self.communicators))
        of = self.communicators[index]

        def call() -> None:
            of.close()
            self.communicators[index] = self._make(index)
            of.close()
            of.stats()

        return call
