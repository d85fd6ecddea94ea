"""Low latency beneath a buffer: DeepEP's arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from moexpress import Communicator, errors
from moexpress.adapter import Element, Ready, limits, low_latency_bytes, plain

from . import _arena, _checks, _handles
from ._arena import Sizes
from ._communicators import Communicators
from ._handles import Known, LowLatencyHandle, LowRouting
from ._taking import Rows_t
from ._under_way import UnderWay
from .utils import EventHandle, EventOverlap

Hook = Callable[[], None]

MOST_SIZE = (1 << 31) - 1
"""The largest size of a communicator."""


def ready_of(
    overlap: bool,
    packed_recv_count: object,
    comp_signal: torch.Tensor | None,
    block_m: int,
    threshold: int,
    num_sms: int,
    src_signals: torch.Tensor | None,
    src_signal_expect_value: int,
) -> Ready | None:
    """When results are ready, in the two forms that SGLang says it in; None where all are."""
    overlap = limits.flag("overlap", overlap)
    if src_signals is not None:
        if comp_signal is not None:
            raise errors.InvalidArgument("comp_signal and src_signals are given, allowed: one of them")
        return Ready(src_signal_expect_value, src_signals, None, num_sms)
    if not overlap:
        if comp_signal is not None:
            raise errors.InvalidArgument("comp_signal is given and overlap is False, allowed: True with it")
        return None
    if comp_signal is None:
        raise errors.InvalidArgument("comp_signal is None, allowed: int32 [local experts * blocks], with overlap")
    if packed_recv_count is not None and not isinstance(packed_recv_count, torch.Tensor):
        raise errors.InvalidArgument(
            f"packed_recv_count is {_checks.told(packed_recv_count)}, allowed: a tensor, or None"
        )
    _checks.whole("comp_signal", comp_signal)
    if comp_signal.is_contiguous():
        comp_signal = comp_signal.view(-1)
    return Ready(threshold, comp_signal, block_m, num_sms)


def low_latency_hint(tokens: Any, hidden: Any, ranks: Any, experts: Any) -> int:
    """Bytes that low latency takes on each rank for top-8, or as many experts as there are."""
    given = {"num_experts": experts, "hidden": hidden, "num_max_dispatch_tokens_per_rank": tokens, "num_ranks": ranks}
    experts, *sizes = (limits.number(name, value, 1, MOST_SIZE) for name, value in given.items())
    return low_latency_bytes(experts, min(8, experts), *sizes)


def element_of(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Element:
    """How rows travel."""
    use_fp8, round_scale = limits.flag("use_fp8", use_fp8), limits.flag("round_scale", round_scale)
    use_ue8m0 = limits.flag("use_ue8m0", use_ue8m0)
    if use_ue8m0 and not round_scale:
        raise errors.InvalidArgument("round_scale is False, allowed: True with use_ue8m0")
    if not use_fp8:
        # There are no scales, whatever is said of them: callers leave that as it is for FP8.
        return "bf16"
    if use_ue8m0:
        return "fp8-ue8m0"
    return "fp8-pow2" if round_scale else "fp8"


def element_on(device: torch.device, element: Element) -> Element:
    """How rows travel there: NPUs have no FP8, and give INT8 for it."""
    if _arena.kind(device) != "npu" or element == "bf16":
        return element
    if element != "fp8":
        raise errors.Unsupported(
            "round_scale and use_ue8m0 are not supported on NPUs, which have no FP8: use_fp8=True alone gives INT8 with a scale a row"
        )
    return "int8"


class LowLatency:
    """The calls of :class:`Buffer` by the same names, with checked options.

    Args:
        shrink: whether a rank that does not deliver is masked, and the others go on without it. On GPUs calls wait for their kernels then.
    """

    def __init__(self, communicators: Communicators, ranks: int, shrink: bool) -> None:
        self.communicators, self.ranks = communicators, ranks
        self._mask = communicators.mask if shrink else None
        self._of: dict[Communicator, UnderWay] = {}
        self._known: Known[LowRouting] = Known()

    @plain
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        max_tokens: int,
        experts: int,
        stats: torch.Tensor | None,
        waited: torch.Tensor | None,
        element: Element,
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[Rows_t, torch.Tensor, Sequence[Any], EventOverlap, Hook | None]:
        if isinstance(x, torch.Tensor):
            _checks.whole("x", x)
        if not isinstance(x, torch.Tensor) or x.dim() != 2:
            raise errors.InvalidArgument(f"x is {_checks.told(x)}, allowed: [tokens, hidden]")
        topk_idx, device = _checks.topk_idx(topk_idx), x.device
        experts = limits.number("num_experts", experts, 1)
        max_tokens = limits.number("num_max_dispatch_tokens_per_rank", max_tokens, 1)
        self._check_waited("dispatch_wait_recv_cost_stats", waited, device)
        of = Sizes(experts, topk_idx.shape[1], x.shape[1], element_on(device, element))
        communicator = self.communicators.low(device, of, max_tokens)
        if stats is not None:
            local = (communicator.local_experts,)
            _checks.tensor("cumulative_local_expert_recv_stats", stats, torch.int32, local, device)
        self.communicators.lent.lead(communicator)
        under_way, receive = self._under_way(communicator), None
        routing = LowRouting(under_way)
        if not return_recv_hook and waited is None and under_way.goes_at_once():
            into = under_way.calls.dispatch(x, topk_idx, None, stats, repeats=True)
            routing.handle = into.handle
        else:
            sent = under_way.calls.send_dispatch(x, topk_idx, None, stats, repeats=True)
            into = result = sent.result

            def has_come() -> None:
                routing.handle = result.handle
                _handles.let_go(result)

            receive = under_way.sent(sent, waited, has_come)
            if not return_recv_hook:
                receive()
                receive = None
        scales = into.scales
        if scales is not None and of.element == "int8":
            scales = scales.squeeze(2)
        rows: Rows_t = into.x if scales is None else (into.x, scales)
        counts, handle = into.expert_counts, LowLatencyHandle.of(routing, into, self._known)
        if receive is None:
            _handles.let_go(into)
        return rows, counts, handle, self._over(communicator, async_finish), receive

    @plain
    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: object,
        zero_copy: bool,
        out: torch.Tensor | None,
        waited: torch.Tensor | None,
        async_finish: bool,
        return_recv_hook: bool,
        ready: Ready | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        made = self._routing(handle)
        under_way, native, topk_idx = made.under_way, made.native, _checks.topk_idx(topk_idx)
        communicator = under_way.communicator
        device, choices = communicator.device, (native.tokens, communicator.topk)
        _checks.tensor("topk_idx", topk_idx, torch.int64, choices, device)
        _checks.tensor("topk_weights", topk_weights, torch.float32, choices, device)
        if device.type == "cpu" and not torch.equal(topk_idx, under_way.calls.choices(native)):
            raise errors.InvalidArgument("topk_idx differs from that of the dispatch, allowed: the same")
        self._check_waited("combine_wait_recv_cost_stats", waited, device)
        self.communicators.lent.lead(communicator)
        y = under_way.zero_copy_buffer() if zero_copy else x
        if ready is None and not return_recv_hook and waited is None and under_way.goes_at_once():
            sums = under_way.calls.combine(y, native, topk_weights, out)
            return sums, self._over(communicator, async_finish), None
        sent = under_way.calls.send_combine(y, native, topk_weights, out, ready)
        receive = under_way.sent(sent, waited)
        if return_recv_hook:
            return sent.result, self._over(communicator, async_finish), receive
        receive()
        return sent.result, self._over(communicator, async_finish), None

    def combine_buffer(self, handle: object) -> torch.Tensor:
        """Where experts' results may be written."""
        return self._routing(handle).under_way.zero_copy_buffer()

    def rejoin(self) -> None:
        """Brings all ranks together again. What was under way is gone."""
        self.clear()
        self.communicators.rejoin(())

    def unmask(self, rank: int) -> None:
        """Brings a rank back, with all ranks. What was under way is gone; those that were masked beside it stay masked."""
        communicators = self.communicators
        others = communicators.masked() - {rank}
        # Nobody waits for those that have ended.
        gone = [other for other in communicators.meeting.lost() if other in others]
        self.clear()
        communicators.rejoin(gone)
        for other in sorted(others.difference(gone)):
            communicators.mask(other)

    def clear(self) -> None:
        """Forgets what is under way: it is gone."""
        for under_way in self._of.values():
            under_way.clear()

    def close(self) -> None:
        """Forgets communicators, which are about to be closed."""
        self._of.clear()

    def _routing(self, handle: object) -> LowRouting:
        """What a handle stands for. Refuses one of another buffer."""
        self.communicators.check_open()
        made = _handles.low_latency(handle, self._known)
        if made.under_way.communicator.meeting is not self.communicators.meeting:
            raise errors.InvalidArgument("handle is of another buffer, allowed: one of this buffer")
        return made

    def _under_way(self, communicator: Communicator) -> UnderWay:
        under_way = self._of.get(communicator)
        if under_way is None:
            made = self.communicators.all_low()
            self._of = {one: under_way for one, under_way in self._of.items() if one in made}
            under_way = self._of[communicator] = UnderWay(communicator, self._mask)
        return under_way

    def _over(self, communicator: Communicator, async_finish: bool) -> EventOverlap:
        """At what the current stream holds now: it waits for low latency."""
        self.communicators.lent.follow(communicator)
        return EventOverlap(EventHandle() if async_finish else None)

    def _check_waited(self, name: str, waited: torch.Tensor | None, device: torch.device) -> None:
        if waited is None:
            return
        kind = _arena.kind(device)
        if kind != "cpu":
            raise errors.Unsupported(
                f"{name} is not supported on {'NPUs' if kind == 'npu' else 'GPUs'}, which do not count the time waited: use None"
            )
        _checks.tensor(name, waited, torch.int64, (self.ranks,), device)
