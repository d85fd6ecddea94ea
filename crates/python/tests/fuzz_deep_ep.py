"""Every public call of `deep_ep`, with drawn arguments, on what earlier calls left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import deep_ep
import torch
import torch.distributed as dist
from deep_ep._handles import LowRouting
from deep_ep.utils import EventHandle, EventOverlap
from fuzz_calls import EXPERTS, HIDDEN, MOST, TOPK, Call, Calls, Kept
from fuzz_values import Values
from moexpress import errors


class OfDeepEp(Calls):
    """A rank alone, with a buffer."""

    # Wrong types are answered as Python answers them.
    documented = (
        *(errors.Error, TypeError, ValueError, AttributeError, RuntimeError, AssertionError, IndexError),
        *(OverflowError, KeyError, MemoryError),
    )

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self.handles, self.low, self.hooks, self.events = Kept(8), Kept(8), Kept(6), Kept(6)
        self.buffer = self._make()

    def close(self) -> None:
        # A rank that has masked itself out frees its memory alone, and is told so.
        with suppress(errors.MeetingFailed):
            self.buffer.destroy()

    def _make(self) -> deep_ep.Buffer:
        return deep_ep.Buffer(
            dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True, enable_shrink=self.values.chance(0.5)
        )

    def all(self) -> list[Callable[[], Call]]:
        often = [self.layout, self.dispatch, self.redispatch, self.combine, self.hook]
        low = [self.low_latency_dispatch, self.low_latency_combine]
        return often * 4 + low * 5 + [self.look, self.settings, self.event] * 2

    def slow(self) -> list[Callable[[], Call]]:
        return [self.opened, self.destroyed, self.masks, self.masks]

    def asynchrony(self) -> dict[str, Any]:
        if self.values.chance(0.6):
            return {}
        event = self.one(self.events, self.number(None, EventOverlap(EventHandle())))
        switches = {
            "async_finish": self.number(False, True),
            "allocate_on_comm_stream": self.number(False, False, True),
        }
        return {"previous_event": event, **switches}

    def x(self, tokens: int) -> Any:
        """bf16 rows, or codes and scales."""
        if self.values.chance(0.6):
            return self.maybe(self.rows(tokens))
        scales = self.values.good(self.random.choice((torch.float32, torch.int32)), (tokens, 1))
        return self.number((self.maybe(self.rows(tokens, torch.float8_e4m3fn)), self.maybe(scales)))

    def layout(self) -> Call:
        idx, experts = self.maybe(self.values.choices(self.tokens(), TOPK, EXPERTS)), self.number(EXPERTS, 8)
        asynchrony = self.asynchrony()
        return lambda: self.events.add(self.buffer.get_dispatch_layout(idx, experts, **asynchrony)[4])

    def dispatch(self) -> Call:
        tokens = self.tokens()
        idx = self.values.choices(tokens, TOPK, EXPERTS)
        per_rank, per_rdma, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(idx, EXPERTS)
        arguments = {
            "x": self.x(tokens),
            "num_tokens_per_rank": self.maybe(per_rank),
            "num_tokens_per_rdma_rank": per_rdma,
            "is_token_in_rank": self.maybe(in_rank),
            "num_tokens_per_expert": self.maybe(per_expert),
            "config": self.number(None, None, deep_ep.Config(4)),
            **self.asynchrony(),
        }
        if self.values.chance(0.8):
            weights = self.values.good(torch.float32, (tokens, TOPK))
            arguments |= {"topk_idx": self.maybe(idx), "topk_weights": self.maybe(weights)}
        if self.values.chance(0.3):
            arguments |= {"expert_alignment": self.number(1, 4), "num_worst_tokens": self.number(0, MOST)}

        def call() -> None:
            rows, _, _, _, handle, event = self.buffer.dispatch(**arguments)
            self.handles.add(handle)
            self.events.add(event)
            self.clean(rows)

        return call

    def handle(self) -> Any:
        handle = self.one(self.handles, self.one(self.low, self.number(None, (), (1, 2, 3, 4, 5, 6))))
        if handle is not None and self.values.chance(0.05):
            change = self.random.choice((tuple, list, copy.copy, copy.deepcopy, lambda handle: handle[:3]))
            with suppress(Exception):
                return change(handle)
        return handle

    def known(self, handle: Any) -> tuple[int, int]:
        """Rows and tokens of a handle."""
        routing = getattr(handle, "routing", None)
        # A low-latency one has nothing beneath before it was received.
        native = routing.handle if isinstance(routing, LowRouting) else getattr(routing, "native", None)
        return getattr(native, "rows", MOST), getattr(native, "tokens", MOST)

    def redispatch(self) -> Call:
        handle = self.handle()
        x, asynchrony = self.x(self.known(handle)[1]), self.asynchrony()
        return lambda: self.clean(self.buffer.dispatch(x, handle=handle, **asynchrony)[0])

    def combine(self) -> Call:
        handle = self.handle()
        rows, tokens = self.known(handle)
        x, asynchrony = self.maybe(self.rows(rows)), self.asynchrony()
        weights = self.maybe(self.values.good(torch.float32, (rows, TOPK))) if self.values.chance(0.5) else None
        bias: Any = [None, None, self.maybe(self.rows(tokens)), (self.rows(tokens), self.maybe(self.rows(tokens)))]
        bias = self.random.choice(bias)
        return lambda: self.clean(self.buffer.combine(x, handle, weights, bias, **asynchrony)[0])

    def low_latency_dispatch(self) -> Call:
        tokens = self.tokens()
        arguments: dict[str, Any] = {
            "x": self.maybe(self.rows(tokens)),
            "topk_idx": self.maybe(self.values.choices(tokens, TOPK, EXPERTS)),
            "num_max_dispatch_tokens_per_rank": self.size(MOST),
            "num_experts": self.size(EXPERTS),
        }
        if self.values.chance(0.3):
            stats, waited = self.values.good(torch.int32, (EXPERTS,), 0), self.values.good(torch.int64, (1,), 0)
            arguments |= {"cumulative_local_expert_recv_stats": self.maybe(stats)}
            arguments |= {"dispatch_wait_recv_cost_stats": self.maybe(waited)}
        for switch in ("use_fp8", "round_scale", "use_ue8m0", "async_finish", "return_recv_hook"):
            if self.values.chance(0.4):
                arguments[switch] = self.number(True, False)

        def call() -> None:
            rows, _, handle, event, hook = self.buffer.low_latency_dispatch(**arguments)
            self.low.add(handle)
            self.events.add(event)
            self.clean(rows)
            if hook is not None:
                self.hooks.add(hook)
                if self.values.chance(0.2):
                    self.changed(self.random.choice([arguments["x"], rows]))

        return call

    def low_latency_combine(self) -> Call:
        handle = self.one(self.low, self.handle())
        tokens = self.known(handle)[1]
        idx = getattr(getattr(handle, "routing", None), "topk_idx", None)
        arguments: dict[str, Any] = {
            "x": self.maybe(self.values.good(torch.bfloat16, (EXPERTS, MOST, HIDDEN))),
            "topk_idx": self.maybe(self.values.choices(tokens, TOPK, EXPERTS) if idx is None else idx),
            "topk_weights": self.maybe(self.values.good(torch.float32, (tokens, TOPK))),
            "handle": handle,
            "out": self.maybe(self.rows(tokens)) if self.values.chance(0.5) else None,
        }
        if self.values.chance(0.2):
            arguments["combine_wait_recv_cost_stats"] = self.maybe(self.values.good(torch.int64, (1,), 0))
        for switch in ("zero_copy", "async_finish", "return_recv_hook", "use_logfmt"):
            if self.values.chance(0.3):
                arguments[switch] = self.number(True, False)

        def call() -> None:
            sums, event, hook = self.buffer.low_latency_combine(**arguments)
            self.events.add(event)
            if hook is None:
                self.clean(sums)
            else:
                self.hooks.add(hook)
                if self.values.chance(0.3):
                    self.changed(self.random.choice([arguments["x"], sums]))

        return call

    def hook(self) -> Call:
        hook = self.random.choice(self.hooks) if self.hooks else None
        return lambda: None if hook is None else hook()

    def look(self) -> Call:
        handle, index = self.handle(), self.random.randrange(-7, 7)
        buffer = self.buffer
        looks: list[Call] = [
            lambda: handle[index],
            lambda: buffer.get_next_low_latency_combine_buffer(handle).fill_(1),
            lambda: buffer.get_local_buffer_tensor(torch.uint8, torch.Size([self.number(1)]), self.number(0)),
            buffer.get_comm_stream,
            buffer.runtime.is_available,
            buffer.runtime.get_local_device_id,
            lambda: buffer.runtime.get_root_rdma_rank(self.number(True, False)),
            lambda: buffer.clean_low_latency_buffer(self.number(MOST), self.number(HIDDEN), self.number(EXPERTS)),
        ]
        return self.random.choice(looks)

    def masks(self) -> Call:
        buffer, status = self.buffer, self.maybe(self.values.good(torch.int32, (1,), 0))
        return self.random.choice(
            (
                lambda: buffer.low_latency_update_mask_buffer(self.number(0, 1), self.number(True, False)),
                lambda: buffer.low_latency_query_mask_buffer(status),
                buffer.low_latency_clean_mask_buffer,
                lambda: buffer.recover(self.number((), [0], [1], [-1])),
                buffer.rejoin,
                buffer.stats,
            )
        )

    def settings(self) -> Call:
        sizes = [self.number(4, 24) for _ in range(self.random.randrange(6))]

        def configured() -> None:
            config = deep_ep.Config(*sizes)
            config.get_nvl_buffer_size_hint(self.number(7168), self.number(8))
            config.get_rdma_buffer_size_hint(self.number(7168), self.number(16))
            repr(config)

        def sms() -> None:
            try:
                deep_ep.Buffer.set_num_sms(self.number(4, 24))
            finally:
                deep_ep.Buffer.num_sms = 20

        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
        return self.random.choice(
            (
                configured,
                sms,
                lambda: deep_ep.Buffer.get_dispatch_config(self.number(2, 8)),
                lambda: deep_ep.Buffer.get_combine_config(self.number(2, 8)),
                lambda: hint(self.number(MOST), self.number(HIDDEN), self.number(1, 8), self.number(8)),
            )
        )

    def event(self) -> Call:
        event = self.one(self.events, deep_ep.Buffer.capture())

        def call() -> None:
            with event:
                pass
            event.current_stream_wait()

        return call

    def opened(self) -> Call:
        """Another buffer, with drawn arguments."""
        arguments = {
            "num_nvl_bytes": self.number(0, 1 << 20),
            "num_rdma_bytes": self.number(0, 1 << 20),
            "low_latency_mode": self.number(True, False),
            "num_qps_per_rank": self.number(24),
            "explicitly_destroy": True,
            "enable_shrink": self.number(True, False),
        }
        group = self.number(dist.group.WORLD)

        def call() -> None:
            buffer = deep_ep.Buffer(group, **arguments)
            buffer.destroy()
            with suppress(errors.Closed):
                buffer.get_dispatch_layout(torch.zeros(1, 1, dtype=torch.int64), EXPERTS)

        return call

    def destroyed(self) -> Call:
        """The buffer is destroyed, used, and made anew. Handles and hooks outlive it."""

        def call() -> None:
            old, self.buffer = self.buffer, self._make()
            old.destroy()
            old.destroy()
            if self.hooks:
                self.random.choice(self.hooks)()

        return call
