"""V2's buffer: one dispatch and one combine for training and for serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from moexpress import Meeting, errors
from moexpress.adapter import default_timeout, limits

from .. import _checks
from .. import _elastic_hints as hints
from .._arena import is_capturing
from .._communicators import WORST_TOKENS, Communicators
from .._elastic import Elastic
from .._elastic_terms import Combined, Counting, Dispatched, Layout
from .._ep_handle import EPHandle
from .._members import Members
from .._not_offered import NotOffered
from .._previous import Previous
from .._small import Small
from .._taking import Rows_t
from ..utils import EventHandle, EventOverlap
from ..utils.envs import get_nvlink_gbs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["EPHandle", "ElasticBuffer"]

MOST_BYTES = (1 << 63) - 1
"""The largest size: DeepEP's are int64."""


class ElasticBuffer(NotOffered):
    """Dispatch and combine of the ranks of a group, with the arguments and results of DeepEP V2.

    Sizes are hints; memory follows the batches. All ranks make the same calls in the same order; the first dispatch with sizes that
    were not seen before (experts, choices, hidden size, type of rows) makes a communicator for them. The order of rows and of sums is
    the same in every run. Every wait ends.

    Args:
        group: a ``torch.distributed`` group of any backend.
        num_bytes: least bytes of memory into which rows are placed directly. Default: :meth:`get_buffer_size_hint`, which is told and
            takes no memory.
        num_cpu_bytes: only 0: there is no storage on the host.
        num_max_tokens_per_rank: bound on the tokens of each rank, for dispatches that name no other.
        hidden, num_topk, use_fp8_dispatch: for the default of ``num_bytes``.
        deterministic, sl_idx: accepted, without effect: the order is always the same.
        allow_hybrid_mode: what :meth:`get_logical_domain_size` says of several nodes; without other effect.
        allow_multiple_reduction: whether the results of a token's experts on one rank are summed there and travel as one row. Without,
            each comes back by itself, and sums are rounded once: of small batches in one launch, of larger ones on GPUs of one node by
            three combines, else by as many combines as a token has choices.
        prefer_overlap_with_compute: what :meth:`get_theoretical_num_sms` recommends: fewer multiprocessors, or more.
        num_allocated_qps: bound on ``num_qps``, which has no other effect.
        num_cpu_timeout_secs, num_gpu_timeout_secs: seconds that an operation may take; the least of both and of ``MOEXPRESS_TIMEOUT``
            counts.
        explicitly_destroy: whether :meth:`destroy` will be called. Without, everything is freed when the buffer is, or at exit.
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if group is None:
            raise errors.InvalidArgument("group is None, allowed: a process group")
        self.deterministic = limits.flag("deterministic", deterministic)
        self.allow_hybrid_mode = limits.flag("allow_hybrid_mode", allow_hybrid_mode)
        self.allow_multiple_reduction = limits.flag("allow_multiple_reduction", allow_multiple_reduction)
        self.prefer_overlap_with_compute = limits.flag("prefer_overlap_with_compute", prefer_overlap_with_compute)
        self.explicitly_destroy = limits.flag("explicitly_destroy", explicitly_destroy)
        if limits.number("num_cpu_bytes", num_cpu_bytes, 0, MOST_BYTES):
            raise errors.Unsupported(
                f"num_cpu_bytes of {num_cpu_bytes} is not supported: storage on the host, Engram's, is not offered here; use 0"
            )
        limits.number("sl_idx", sl_idx)
        given = {"num_cpu_timeout_secs": num_cpu_timeout_secs, "num_gpu_timeout_secs": num_gpu_timeout_secs}
        timeout = min(default_timeout(), *(limits.seconds(name, value) for name, value in given.items()))
        self.num_max_tokens_per_rank = limits.number(
            "num_max_tokens_per_rank", num_max_tokens_per_rank, 0, WORST_TOKENS
        )
        hint = 0 if num_bytes is None else limits.number("num_bytes", num_bytes, 0, MOST_BYTES)
        qps = limits.number("num_allocated_qps", num_allocated_qps)
        self.num_allocated_qps = qps or (hints.HYBRID_QPS if self.allow_hybrid_mode else hints.DIRECT_QPS)
        self.num_bytes = hint
        if num_bytes is None:
            self.num_bytes = self.get_buffer_size_hint(
                group,
                num_max_tokens_per_rank,
                hidden,
                num_topk,
                use_fp8_dispatch,
                allow_hybrid_mode,
                allow_multiple_reduction,
            )
        # Who says nothing of timeouts lets ranks come as late as their group does.
        self._meeting = meeting = Meeting(group, timeout=None if timeout == default_timeout() else timeout)
        self.group, self.rank_idx, self.num_ranks = group, meeting.rank, meeting.world
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self._communicators = Communicators(meeting, hint, timeout)
        self._communicators.goes_with(self)
        small = Small(self._communicators, self.num_max_tokens_per_rank, not self.allow_multiple_reduction)
        self._calls = Elastic(self._communicators, Members(self.num_ranks), small)

    def destroy(self) -> None:
        """Frees everything. All ranks call it.

        Raises:
            AssertionError: the buffer was made without ``explicitly_destroy=True``.
        """
        assert self.explicitly_destroy, "make the buffer with explicitly_destroy=True to destroy it"
        self._communicators.destroy()

    def recover(self, mask: Sequence[int] = ()) -> None:
        """Goes on after a failure, without the ranks of ``mask``: all others call it, and handles of before are refused. Not of DeepEP,
        whose buffers end with the first failure.

        Raises:
            moexpress.errors.Excluded: the others gave up on this rank.
        """
        self._communicators.recover(_checks.mask(mask, self.num_ranks))

    def stats(self) -> dict[str, int]:
        """Rows by the way they took, as :meth:`Buffer.stats` has them. Not of DeepEP."""
        return self._communicators.stats()

    def trim(self) -> None:
        """As :meth:`Buffer.trim`. Not of DeepEP."""
        self._communicators.trim()

    # Hints.

    @staticmethod
    def get_buffer_size_hint(
        group: ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of the rows of a worst batch, a multiple of 2 MiB. ``num_topk``: 0 for any."""
        tokens = limits.number("num_max_tokens_per_rank", num_max_tokens_per_rank, 0, WORST_TOKENS)
        hidden, topk = limits.number("hidden", hidden, 0), limits.number("num_topk", num_topk, 0)
        fp8, multiple = (
            limits.flag("use_fp8_dispatch", use_fp8_dispatch),
            limits.flag("allow_multiple_reduction", allow_multiple_reduction),
        )
        return hints.buffer_bytes(group.size(), tokens, hidden, topk, fp8, multiple)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Multiprocessors that keep the links busy when choices are balanced: an even number.

        Args:
            num_scaleout_topk: only 0.
            rdma_gbs: accepted, without effect.
            nvlink_gbs: of a GPU's links; 0 to look.
            sm_read_gbs, sm_write_gbs: of a multiprocessor.
        """
        limits.number("num_scaleout_topk", num_scaleout_topk, 0, 0)
        experts, topk = limits.number("num_experts", num_experts), limits.number("num_topk", num_topk)
        device = None
        if torch.cuda.is_available():
            device = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        given = limits.real("nvlink_gbs", nvlink_gbs, zero=True)
        links = given or (get_nvlink_gbs() if device else 0) or hints.LINK_GBS
        overlap = self.prefer_overlap_with_compute
        return hints.multiprocessors(self.num_ranks, experts, topk, links, sm_read_gbs, sm_write_gbs, overlap, device)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs for a call of so many multiprocessors. Nothing takes them."""
        sms = limits.number("num_sms", num_sms)
        return hints.queue_pairs(sms, self.num_allocated_qps, self.allow_hybrid_mode)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Nodes, and ranks of each."""
        return self._meeting.nodes, self._meeting.ranks_per_node

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Domains between which rows go in two steps, and ranks of each: the nodes, or one where ``allow_hybrid_mode`` is False."""
        return self.get_physical_domain_size() if self.allow_hybrid_mode else (1, self.num_ranks)

    # Order.

    @staticmethod
    def capture() -> EventHandle:
        """An event at what the current stream holds now."""
        return EventHandle()

    def get_comm_stream(self) -> torch.Stream:
        """A stream that calls come behind, and that comes behind calls, as soon as it was asked for; the same each time. CUDA only."""
        return self._communicators.stream()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """All ranks call it; it ends when all have, and when what their GPUs held is done. The host waits, whatever
        ``with_cpu_sync`` says."""
        self._communicators.check_open()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            if is_capturing(torch.device("cuda")):
                raise errors.Unsupported(
                    "barrier is not supported in a capture: ranks' graphs wait for each other by themselves"
                )
            torch.cuda.synchronize()
        self._communicators.meeting.barrier()

    # Calls.

    def dispatch(
        self,
        x: Rows_t,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Dispatched:
        """Sends each row to the ranks that hold its experts, once to each rank.

        Args:
            x: bf16 ``[tokens, hidden]``, or float8_e4m3fn ``[tokens, hidden]`` with scales ``[tokens, scales]``, f32 or int32.
            topk_idx: int64 ``[tokens, topk]``, -1 for a dropped choice; no token names an expert twice.
            topk_weights: f32 ``[tokens, topk]``, carried to the receiver.
            cumulative_local_expert_recv_stats: int32 ``[local experts]``, to which received choices are added; not by a cached dispatch.
            num_experts: experts in all.
            num_max_tokens_per_rank: bound on the tokens of each rank, the same on all. Default: the buffer's.
            expert_alignment: expert counts, and the places of expanded rows, are rounded up to a multiple of this. Default: 1.
            num_sms: multiprocessors of kernels; counts for communicators made by this call. Default: those of
                :meth:`get_theoretical_num_sms`.
            num_qps: accepted, at most ``num_allocated_qps``.
            previous_event, previous_event_before_epilogue: what to come behind.
            async_with_compute_stream: the current stream does not wait; the returned event does.
            allocate_on_comm_stream: accepted: memory is kept as long as it must be.
            handle: of an earlier dispatch, whose routing is used again: a cached dispatch, without ``topk_idx``. With
                ``topk_weights``, or with rows of another type, ranks exchange counts once more; without, they do not.
            do_handle_copy: whether the handle has its own copy of ``topk_idx``.
            do_cpu_sync: whether counts come to the host, so that results have just the rows that came. Without, there is room for
                ``ranks * num_max_tokens_per_rank`` rows, and the call can be captured. Default: True, but for a cached dispatch.
            do_expand: a row for each choice, expert-major, instead of one for each token.
            do_zero_padding: with ``do_expand``: what is no row is zeros instead of undefined. There may be more of it than rows.
            use_tma_aligned_col_major_sf: scales column by column, each column at a multiple of 16 bytes.

        Returns:
            Rows (in the form of ``x``); local expert of each choice, or -1 (None of expanded rows); weights, if some were sent,
            ``[rows, topk]`` or ``[expanded rows]``; the handle; an event, if asynchronous. Beyond what came, rows that are not expanded and
            weights are 0, and choices -1.
        """
        self._communicators.check_usable()
        defer = limits.flag("async_with_compute_stream", async_with_compute_stream)
        limits.flag("allocate_on_comm_stream", allocate_on_comm_stream)
        layout = Layout(
            limits.flag("do_expand", do_expand),
            limits.flag("use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf),
            limits.flag("do_zero_padding", do_zero_padding),
        )
        if layout.zeros and not layout.expand:
            raise errors.InvalidArgument("do_zero_padding is True, allowed: with do_expand only")
        sms = limits.number("num_sms", num_sms)
        limits.number("num_qps", num_qps, 0, self.num_allocated_qps)
        copies, sync = limits.flag("do_handle_copy", do_handle_copy), do_cpu_sync
        if sync is not None:
            sync = limits.flag("do_cpu_sync", sync)
        numbers = {
            "num_experts": (num_experts, 1 << 31),
            "num_max_tokens_per_rank": (num_max_tokens_per_rank, WORST_TOKENS),
            "expert_alignment": (expert_alignment, 1 << 20),
        }
        given = {
            name: limits.number(name, value, 1, most) for name, (value, most) in numbers.items() if value is not None
        }
        if handle is not None:
            self._check_cached(handle, topk_idx, sync, given)
            previous = _previous(defer, previous_event, previous_event_before_epilogue)
            return self._calls.redispatch(x, handle, topk_weights, layout, defer, previous)
        if topk_idx is None:
            raise errors.InvalidArgument("topk_idx is None, allowed: int64 [tokens, topk], or a handle instead")
        experts = given.get("num_experts", 0)
        if not experts or experts % self.num_ranks:
            told = experts or None
            raise errors.InvalidArgument(f"num_experts is {told}, allowed: a multiple of the {self.num_ranks} ranks")
        _checks.whole("topk_idx", topk_idx)
        topk = topk_idx.shape[1] if topk_idx.dim() == 2 else 1
        sms = sms or self.get_theoretical_num_sms(experts, topk)
        counting = Counting(
            given.get("num_max_tokens_per_rank", self.num_max_tokens_per_rank),
            given.get("expert_alignment", 1),
            sync is not False,
        )
        if not counting.most_tokens:
            raise errors.InvalidArgument(
                f"num_max_tokens_per_rank is 0, allowed: 1 to {WORST_TOKENS}, here or for the buffer"
            )
        self._communicators.multiprocessors = sms
        previous = _previous(defer, previous_event, previous_event_before_epilogue)
        stats = cumulative_local_expert_recv_stats
        return self._calls.dispatch(
            x, topk_idx, topk_weights, stats, experts, counting, sms, copies, layout, defer, previous
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Combined:
        """Brings rows back and sums them for each token, unweighted, in f32, ranks ascending, rounded to bf16 once. Expanded rows are
        summed at their rank first, choices ascending, and rounded there too (``allow_multiple_reduction``).

        Args:
            x: bf16 ``[rows, hidden]``, in the order of the received rows, expanded ones where the dispatch expanded.
            handle: of the dispatch.
            topk_weights: f32 ``[rows, topk]``, or of expanded rows ``[rows]``, summed likewise.
            bias: one or two bf16 ``[tokens, hidden]`` that the sums start from; of two either may be None.
            num_sms, num_qps: accepted.
            previous_event, previous_event_before_epilogue: what to come behind.
            async_with_compute_stream: the current stream does not wait; the returned event does.
            allocate_on_comm_stream: accepted.

        Returns:
            bf16 ``[tokens, hidden]``; f32 ``[tokens, topk]`` or None; an event, if asynchronous.
        """
        self._communicators.check_usable()
        defer = limits.flag("async_with_compute_stream", async_with_compute_stream)
        limits.flag("allocate_on_comm_stream", allocate_on_comm_stream)
        limits.number("num_sms", num_sms)
        limits.number("num_qps", num_qps, 0, self.num_allocated_qps)
        self._check_handle(handle)
        previous = _previous(defer, previous_event, previous_event_before_epilogue)
        return self._calls.combine(x, handle, topk_weights, bias, self.allow_multiple_reduction, defer, previous)

    # Inside.

    def _check_cached(
        self, handle: object, topk_idx: torch.Tensor | None, sync: bool | None, given: dict[str, int]
    ) -> None:
        """Refuses what does not go with a handle."""
        handle = self._check_handle(handle)
        if topk_idx is not None:
            raise errors.InvalidArgument("topk_idx is given with a handle, allowed: None in a cached dispatch")
        if sync:
            raise errors.InvalidArgument("do_cpu_sync is True, allowed: False or None in a cached dispatch")
        for name, value in given.items():
            if value != getattr(handle, name):
                raise errors.InvalidArgument(f"{name} is {value}, allowed: {getattr(handle, name)}, as in the handle")

    def _check_handle(self, handle: object) -> EPHandle:
        if not isinstance(handle, EPHandle):
            raise errors.InvalidArgument(f"handle is a {type(handle).__name__}, allowed: the EPHandle of a dispatch")
        if handle.routing.communicator.meeting is not self._communicators.meeting:
            raise errors.InvalidArgument("handle is of another buffer, allowed: one of this buffer")
        if handle.routing.generation != self._communicators.generation:
            raise errors.InvalidArgument("handle is of before a recovery, allowed: one of after it")
        return handle


def _previous(defer: bool, *events: Any) -> Previous:
    """What a call is to come behind."""
    for event in events:
        if event is not None and not isinstance(event, EventOverlap | EventHandle):
            raise errors.InvalidArgument(f"previous_event is a {type(event).__name__}, allowed: an EventHandle")
    return Previous.taken(defer, *events)
