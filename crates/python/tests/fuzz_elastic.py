"""Every public call of `deep_ep.ElasticBuffer`, with drawn arguments, on what earlier calls left behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import deep_ep
import torch
import torch.distributed as dist
from deep_ep.utils import EventHandle, EventOverlap
from fuzz_calls import EXPERTS, HIDDEN, MOST, TOPK, Call, Calls, Kept
from fuzz_values import Values
from moexpress import errors

FIELDS = (
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
)
"""Of a handle, computed when they are read."""


class OfElastic(Calls):
    """A rank alone, with a buffer."""

    # Wrong types are answered as Python answers them.
    documented = (
        *(errors.Error, TypeError, ValueError, AttributeError, RuntimeError, AssertionError),
        *(OverflowError, MemoryError),
    )

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self.handles, self.events = Kept(8), Kept(6)
        self.buffer = self._make()

    def close(self) -> None:
        # A rank that has masked itself out frees its memory alone, and is told so.
        with suppress(errors.MeetingFailed):
            self.buffer.destroy()

    def _make(self) -> deep_ep.ElasticBuffer:
        return deep_ep.ElasticBuffer(
            dist.group.WORLD,
            num_max_tokens_per_rank=MOST,
            hidden=HIDDEN,
            allow_multiple_reduction=self.values.chance(0.7),
            explicitly_destroy=True,
        )

    def all(self) -> list[Callable[[], Call]]:
        return [self.dispatch, self.redispatch, self.combine] * 5 + [self.look, self.hints, self.event]

    def slow(self) -> list[Callable[[], Call]]:
        return [self.opened, self.destroyed, self.recovered]

    def asynchrony(self) -> dict[str, Any]:
        if self.values.chance(0.6):
            return {}
        event = self.one(self.events, self.number(None, EventHandle(), EventOverlap(EventHandle())))
        switches = ("async_with_compute_stream", "allocate_on_comm_stream")
        return {
            self.random.choice(("previous_event", "previous_event_before_epilogue")): event,
            **{switch: self.number(False, True) for switch in switches},
        }

    def x(self, tokens: int) -> Any:
        """bf16 rows, or codes and scales."""
        if self.values.chance(0.6):
            return self.maybe(self.rows(tokens))
        scales = self.values.good(self.random.choice((torch.float32, torch.int32)), (tokens, 1))
        return self.number((self.maybe(self.rows(tokens, torch.float8_e4m3fn)), self.maybe(scales)))

    def layout(self, **likely: Any) -> dict[str, Any]:
        """How rows are handed over."""
        expand = self.number(True, False)
        drawn = {"do_expand": expand, "do_zero_padding": self.number(expand, False)}
        drawn["use_tma_aligned_col_major_sf"] = self.number(True, False)
        return {name: value for name, value in drawn.items() if self.values.chance(0.8)} | likely

    def weights(self, tokens: int) -> Any:
        return self.maybe(self.values.good(torch.float32, (tokens, TOPK))) if self.values.chance(0.5) else None

    def dispatch(self) -> Call:
        tokens = self.tokens()
        arguments: dict[str, Any] = {
            "x": self.x(tokens),
            "topk_idx": self.maybe(self.values.choices(tokens, TOPK, EXPERTS)),
            "topk_weights": self.weights(tokens),
            "num_experts": self.size(EXPERTS),
            **self.layout(),
            **self.asynchrony(),
        }
        if self.values.chance(0.3):
            stats = self.values.good(torch.int32, (EXPERTS,), 0)
            arguments |= {"cumulative_local_expert_recv_stats": self.maybe(stats)}
        good = {"num_max_tokens_per_rank": (MOST,), "expert_alignment": (1, 4), "num_sms": (0, 4), "num_qps": (0, 1)}
        good |= {"do_cpu_sync": (None, True, False), "do_handle_copy": (True, False)}
        for name, values in good.items():
            if self.values.chance(0.3):
                arguments[name] = self.number(*values)

        def call() -> None:
            rows, idx, weights, handle, event = self.buffer.dispatch(**arguments)
            self.handles.add(handle)
            self.events.add(event)
            self.clean(rows)
            if self.values.chance(0.2):
                # Callers write to all of it, and to choices of which the handle has no copy.
                self.changed(self.random.choice([arguments["topk_idx"], rows, idx, weights]))

        return call

    def handle(self) -> Any:
        return self.one(self.handles, self.number(None, (), deep_ep.EPHandle(*[None] * 16)))  # type: ignore[arg-type]

    def redispatch(self) -> Call:
        handle = self.handle()
        tokens = getattr(getattr(handle, "topk_idx", None), "shape", (MOST,))[0]
        x, weights, layout, asynchrony = self.x(tokens), self.weights(tokens), self.layout(), self.asynchrony()

        def call() -> None:
            rows, _, _, _, event = self.buffer.dispatch(x, topk_weights=weights, handle=handle, **layout, **asynchrony)
            self.events.add(event)
            self.clean(rows)

        return call

    def combine(self) -> Call:
        handle = self.handle()
        expands = getattr(handle, "do_expand", False)
        rows = getattr(handle, "num_expanded_tokens" if expands else "num_recv_tokens", MOST) or 0
        tokens = getattr(getattr(handle, "topk_idx", None), "shape", (MOST,))[0]
        x, asynchrony = self.maybe(self.rows(rows)), self.asynchrony()
        shape = (rows,) if expands else (rows, TOPK)
        weights = self.maybe(self.values.good(torch.float32, shape)) if self.values.chance(0.5) else None
        bias: Any = [None, None, self.maybe(self.rows(tokens)), (self.rows(tokens), self.maybe(self.rows(tokens)))]
        bias = self.random.choice(bias)
        return lambda: self.clean(self.buffer.combine(x, handle, weights, bias, **asynchrony)[0])

    def look(self) -> Call:
        handle, name = self.handle(), self.random.choice(FIELDS)

        def call() -> None:
            field = getattr(handle, name)
            if self.values.chance(0.3):
                self.changed(field)

        looks: list[Call] = [call, call, call, self.buffer.stats, self.buffer.barrier, self.buffer.get_comm_stream]
        return self.random.choice(looks)

    def hints(self) -> Call:
        buffer, group = self.buffer, dist.group.WORLD
        sizes = [self.number(1, MOST), self.number(HIDDEN), self.number(TOPK), self.number(True, False)]
        return self.random.choice(
            (
                lambda: buffer.get_buffer_size_hint(group, *sizes),
                lambda: buffer.get_theoretical_num_sms(self.number(EXPERTS), self.number(TOPK), self.number(0)),
                lambda: buffer.get_theoretical_num_sms(EXPERTS, TOPK, 0, 0, *[self.number(100.0) for _ in range(3)]),
                lambda: buffer.get_theoretical_num_qps(self.number(4, 20)),
            )
        )

    def event(self) -> Call:
        event = self.one(self.events, EventOverlap(deep_ep.ElasticBuffer.capture()))

        def call() -> None:
            with event(release_handle=self.values.chance(0.5)):
                pass

        return call

    def opened(self) -> Call:
        """Another buffer, with drawn arguments."""
        good: dict[str, tuple[Any, ...]] = {
            "num_bytes": (None, 0, 1 << 21),
            "num_max_tokens_per_rank": (MOST,),
            "hidden": (HIDDEN,),
            "num_topk": (0, TOPK),
            "num_cpu_bytes": (0,),
            "sl_idx": (0, 3),
            "num_allocated_qps": (0, 8),
            "num_cpu_timeout_secs": (5,),
            "num_gpu_timeout_secs": (5,),
        }
        switches = ("use_fp8_dispatch", "deterministic", "allow_hybrid_mode", "allow_multiple_reduction")
        arguments = {name: self.number(*values) for name, values in good.items()}
        arguments |= {switch: self.number(True, False) for switch in switches}
        group = self.number(dist.group.WORLD)

        def call() -> None:
            buffer = deep_ep.ElasticBuffer(group, explicitly_destroy=True, **arguments)
            buffer.destroy()
            with suppress(errors.Closed):
                buffer.barrier()

        return call

    def destroyed(self) -> Call:
        """The buffer is destroyed and made anew. Handles outlive it."""

        def call() -> None:
            old, self.buffer = self.buffer, self._make()
            old.destroy()
            old.destroy()

        return call

    def recovered(self) -> Call:
        mask = self.number((), [0], [1], [-1])
        return lambda: self.buffer.recover(mask)
