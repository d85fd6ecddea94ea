"""The buffer: DeepEP's entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from moexpress import Communicator, Meeting, Received, _native, errors
from moexpress._communicator import Element
from moexpress._meeting import default_timeout
from moexpress._order import deferring
from moexpress._plain import plain

from . import _checks, _handles, config
from ._communicators import Communicators
from ._layout import dispatch_layout
from ._low_latency import LowLatency
from ._scales import Rows
from .config import Config
from .utils import EventHandle, EventOverlap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Rows_t = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Runtime:
    """What frameworks ask DeepEP's ``buffer.runtime``: one NVLink domain."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def is_available(self) -> bool:
        """Whether calls can be made."""
        return not self._buffer._communicators.closed

    def get_num_rdma_ranks(self) -> int:
        """Nodes."""
        return 1

    def get_rdma_rank(self) -> int:
        """This node."""
        return 0

    def get_root_rdma_rank(self, get_global: bool) -> int:
        """The rank of each node that others look for first."""
        return self._buffer.rank if get_global else 0

    def get_local_device_id(self) -> int:
        """The GPU of this process; 0 on CPUs."""
        return torch.cuda.current_device() if torch.cuda.is_available() else 0


class Buffer:
    """Dispatch and combine of the ranks of a group, with DeepEP's arguments and results.

    Sizes are hints. All ranks make the same calls in the same order; the first call with sizes that were not seen before makes a
    communicator for them. Every wait ends: by ``MOEXPRESS_TIMEOUT`` seconds (100 unless it is set).

    Args:
        group: a ``torch.distributed`` group of any backend.
        num_nvl_bytes: hint for the memory into which rows are placed directly; more rows go through rings.
        num_rdma_bytes: accepted, and not needed.
        low_latency_mode: whether low-latency calls may be made.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric: accepted, without effect.
        explicitly_destroy: whether :meth:`destroy` will be called. Without, everything is freed when the buffer is, or at exit.
        enable_shrink: low latency goes on without ranks that do not deliver; see the mask methods.
        comm: an MPI communicator instead of a group.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        use_fabric: bool = False,
    ) -> None:
        if group is None and comm is None:
            raise errors.InvalidArgument("group is None, allowed: a process group, or comm, an MPI communicator")
        timeout = default_timeout()
        meeting = Meeting(group, comm=comm, timeout=timeout)
        self.group, self.rank, self.group_size = group, meeting.rank, meeting.world
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.runtime = Runtime(self)
        self._communicators = Communicators(meeting, num_nvl_bytes, timeout)
        self._low: dict[Communicator, LowLatency] = {}

    # Of all buffers.

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether FP8 and low latency are there: always."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Multiprocessors that kernels of throughput mode occupy, an even number: of buffers whose first dispatch is still to come."""
        if not isinstance(new_num_sms, int) or new_num_sms < 2 or new_num_sms % 2:
            raise errors.InvalidArgument(f"num_sms is {new_num_sms}, allowed: an even number, 2 or more")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event at what the current stream holds now."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """What DeepEP recommends. A hint."""
        return config.dispatch_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """What DeepEP recommends. A hint."""
        return config.combine_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that low latency takes on each rank for top-8 (or as many experts as there are)."""
        topk = min(8, num_experts)
        return _native.low_latency_bytes(num_experts, topk, hidden, num_max_dispatch_tokens_per_rank, num_ranks)

    # Of one.

    def destroy(self) -> None:
        """Frees everything. All ranks call it.

        Raises:
            AssertionError: the buffer was made without ``explicitly_destroy=True``.
        """
        assert self.explicitly_destroy, "make the buffer with explicitly_destroy=True to destroy it"
        if not self._communicators.closed:
            self._communicators.meeting.barrier()
        self._close()

    def _close(self) -> None:
        self._low.clear()
        self._communicators.close()

    def get_comm_stream(self) -> torch.Stream:
        """The stream that throughput calls enqueue to. CUDA only, after the first dispatch."""
        for communicator in [*self._communicators._normal.values(), *self._communicators.all_low()]:
            if communicator.order.stream is not None:
                return communicator.order.stream
        raise errors.Unsupported(
            "a stream is not supported before the first call on CUDA tensors: make one, or use none on CPUs"
        )

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Not supported: windows belong to the protocol."""
        raise errors.Unsupported(
            "a view of the communication buffer is not supported: use get_next_low_latency_combine_buffer for experts' results, or "
            "a tensor of your own"
        )

    # Throughput mode.

    @plain
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts and membership of a batch.

        Args:
            topk_idx: int64 ``[tokens, topk]``, -1 for a dropped choice.
            num_experts: experts in all.

        Returns:
            int32 ``[ranks]`` tokens for each rank; None (tokens for each node); int32 ``[experts]`` tokens for each expert; bool
            ``[tokens, ranks]`` membership; an event, if asynchronous.
        """
        _checks.asynchrony(previous_event, async_finish, allocate_on_comm_stream)
        _checks.topk_idx(topk_idx)
        if num_experts < 1 or num_experts % self.group_size:
            raise errors.InvalidArgument(
                f"num_experts is {num_experts}, allowed: a multiple of the {self.group_size} ranks"
            )
        if previous_event is not None:
            previous_event.current_stream_wait()
        per_rank, per_expert, in_rank = dispatch_layout(topk_idx, self.group_size, num_experts)
        return per_rank, None, per_expert, in_rank, _finished(async_finish)

    @plain
    def dispatch(
        self,
        x: Rows_t,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Rows_t,
        torch.Tensor | None,
        torch.Tensor | None,
        list[int] | None,
        tuple[Any, ...] | None,
        EventOverlap,
    ]:
        """Sends each row to the ranks that hold its experts, once to each rank.

        Args:
            x: bf16 ``[tokens, hidden]``, or float8_e4m3fn ``[tokens, hidden]`` with scales ``[tokens, scales]``, f32 or int32.
            handle: of an earlier dispatch, whose routing is used again: a cached dispatch.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: from :meth:`get_dispatch_layout`.
            num_tokens_per_rdma_rank: ignored.
            topk_idx: int64 ``[tokens, topk]``, with ``topk_weights`` f32 ``[tokens, topk]``: both or neither.
            expert_alignment: counts for each expert are rounded up to a multiple of this.
            num_worst_tokens: rows to make room for; then no count comes to the host, and the list of counts is empty.
            config: accepted, without effect.

        Returns:
            Rows (in the form of ``x``); local expert of each choice, or -1; its weight; counts for each local expert; the handle;
            an event, if asynchronous. A cached dispatch returns None for all but the rows and the event.
        """
        _checks.asynchrony(previous_event, async_finish, allocate_on_comm_stream)
        _checks.config(config)
        rows = Rows.of(x)
        if previous_event is not None:
            previous_event.current_stream_wait()
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise errors.InvalidArgument("topk_idx is given with a handle, allowed: None in a cached dispatch")
            return self._redispatch(rows, _handles.normal(handle), async_finish)
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise errors.InvalidArgument(
                "num_tokens_per_rank, is_token_in_rank or num_tokens_per_expert is None, allowed: what get_dispatch_layout returned"
            )
        if (topk_idx is None) != (topk_weights is None):
            raise errors.InvalidArgument("one of topk_idx and topk_weights is None, allowed: both or neither")
        if num_worst_tokens and topk_idx is None:
            raise errors.InvalidArgument("num_worst_tokens is given without topk_idx, allowed: with it")
        tokens, hidden, device = rows.x.shape[0], rows.x.shape[1], rows.x.device
        experts = num_tokens_per_expert.numel()
        _checks.tensor("num_tokens_per_rank", num_tokens_per_rank, torch.int32, [self.group_size], device)
        _checks.tensor("num_tokens_per_expert", num_tokens_per_expert, torch.int32, [experts], device)
        _checks.tensor("is_token_in_rank", is_token_in_rank, torch.bool, [tokens, self.group_size], device)
        worst: dict[str, Any] = {"alignment": expert_alignment, "worst_rows": num_worst_tokens}
        if topk_idx is None or topk_weights is None:
            communicator = self._normal(device, experts, 1, hidden, rows.element)
            counts = num_tokens_per_expert.tolist()
            received = deferring(
                communicator.order,
                async_finish,
                communicator.dispatch_members,
                rows.x,
                is_token_in_rank,
                counts,
                scales=rows.scales,
                **worst,
            )
        else:
            _checks.topk_idx(topk_idx)
            _checks.tensor("topk_idx", topk_idx, torch.int64, [tokens, topk_idx.shape[1]], device)
            _checks.tensor("topk_weights", topk_weights, torch.float32, [tokens, topk_idx.shape[1]], device)
            if device.type == "cpu":
                _checks.membership(topk_idx, is_token_in_rank, experts, self.group_size)
            communicator = self._normal(device, experts, topk_idx.shape[1], hidden, rows.element)
            # No count comes to the host, so that a GPU's calls can be captured.
            worst["device_counts"] = num_worst_tokens > 0
            received = deferring(
                communicator.order,
                async_finish,
                communicator.dispatch,
                rows.x,
                topk_idx,
                topk_weights,
                scales=rows.scales,
                **worst,
            )
        channels = (config.num_sms if config is not None else Buffer.num_sms) // 2
        made = _handles.Handle.of(communicator, received.handle, received.source_token, is_token_in_rank, channels)
        return (
            _taken(rows, received, communicator, async_finish),
            received.topk_idx,
            received.topk_weights,
            [] if num_worst_tokens else received.expert_counts,
            made,
            _event(communicator, async_finish),
        )

    def _redispatch(
        self, rows: Rows, handle: _handles.Handle, async_finish: bool
    ) -> tuple[Rows_t, None, None, None, None, EventOverlap]:
        communicator, native = handle.communicator, handle.native
        if rows.element != communicator.element:
            # Rows of another element type travel in a communicator of their own, which has to learn the routing once.
            other = self._normal(rows.x.device, communicator.experts, 1, communicator.hidden, rows.element)
            known = handle.others.get(rows.element)
            if known is None:
                zeros = [0] * communicator.experts
                received = deferring(
                    other.order, async_finish, other.dispatch_members, rows.x, handle[4], zeros, scales=rows.scales
                )
                handle.others[rows.element] = (other, received.handle)
                out = _taken(rows, received, other, async_finish)
                return out, None, None, None, None, _event(other, async_finish)
            communicator, native = known
        received = deferring(
            communicator.order, async_finish, communicator.redispatch, rows.x, native, scales=rows.scales
        )
        out = _taken(rows, received, communicator, async_finish)
        return out, None, None, None, None, _event(communicator, async_finish)

    @plain
    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[Any, ...],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Brings rows back and sums them for each token, unweighted, in f32, ranks ascending, rounded to bf16 once.

        Args:
            x: bf16 ``[rows, hidden]``, in the order of the received rows.
            handle: of the dispatch.
            topk_weights: f32 ``[rows, topk]``, summed likewise.
            bias: one or two bf16 ``[tokens, hidden]`` that the sums start from.
            config: accepted, without effect.

        Returns:
            bf16 ``[tokens, hidden]``; f32 ``[tokens, topk]`` or None; an event, if asynchronous.
        """
        _checks.asynchrony(previous_event, async_finish, allocate_on_comm_stream)
        _checks.config(config)
        made = _handles.normal(handle)
        if previous_event is not None:
            previous_event.current_stream_wait()
        call = made.communicator.combine
        combined = deferring(
            made.communicator.order, async_finish, call, x, made.native, topk_weights=topk_weights, bias=bias
        )
        return combined.x, combined.topk_weights, _event(made.communicator, async_finish)

    def internode_dispatch(self, *arguments: Any, **named: Any) -> Any:
        """Not supported: :meth:`dispatch` serves all ranks of one NVLink domain."""
        raise errors.Unsupported("internode_dispatch is not supported: use dispatch, among the ranks of one host")

    def internode_combine(self, *arguments: Any, **named: Any) -> Any:
        """Not supported: :meth:`combine` serves all ranks of one NVLink domain."""
        raise errors.Unsupported("internode_combine is not supported: use combine, among the ranks of one host")

    # Low latency.

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing: low latency leaves nothing behind that would have to be cleaned."""
        self._check_low_latency_mode()

    @plain
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows_t, torch.Tensor, tuple[Any, ...], EventOverlap, Callable[[], None] | None]:
        """Sends each row to its experts' ranks, cast to FP8 on the way where asked for.

        Args:
            x: bf16 ``[tokens, hidden]``, at most ``num_max_dispatch_tokens_per_rank`` tokens.
            topk_idx: int64 ``[tokens, topk]``, -1 for a dropped choice.
            num_max_dispatch_tokens_per_rank: the same on all ranks.
            cumulative_local_expert_recv_stats: int32 ``[local experts]``, to which received rows are added.
            dispatch_wait_recv_cost_stats: int64 ``[ranks]``, to which nanoseconds waited for each rank are added.
            use_fp8: FP8 rows with a scale for each 128 elements; else bf16.
            round_scale: scales are powers of two.
            use_ue8m0: and stored as UE8M0, four in an int32. Needs ``round_scale``.
            return_recv_hook: return once everything is sent; calling the hook receives.

        Returns:
            ``[local experts, ranks * max tokens, hidden]`` rows, with FP8 a tuple with scales ``[local experts, ranks * max tokens,
            hidden / 128]`` f32 or ``[.., hidden / 512]`` int32, column-major; int32 ``[local experts]`` rows of each; the handle; an
            event; the hook, or None.
        """
        self._check_low_latency_mode()
        _checks.hook(async_finish, return_recv_hook)
        if (round_scale or use_ue8m0) and not use_fp8:
            raise errors.InvalidArgument("use_fp8 is False, allowed: True with round_scale or use_ue8m0")
        if use_ue8m0 and not round_scale:
            raise errors.InvalidArgument("round_scale is False, allowed: True with use_ue8m0")
        if not isinstance(x, torch.Tensor) or x.dim() != 2:
            raise errors.InvalidArgument(f"x is {_checks.told(x)}, allowed: [tokens, hidden]")
        _checks.topk_idx(topk_idx)
        element: Element = "bf16"
        if use_fp8:
            element = "fp8-ue8m0" if use_ue8m0 else "fp8-pow2" if round_scale else "fp8"
        communicator = self._communicators.low(
            x.device, num_experts, topk_idx.shape[1], x.shape[1], num_max_dispatch_tokens_per_rank, element
        )
        low = self._low_of(communicator)
        local, ranks, device = communicator.local_experts, self.group_size, x.device
        stats, waited = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        if stats is not None:
            _checks.tensor("cumulative_local_expert_recv_stats", stats, torch.int32, [local], device)
        if waited is not None:
            _checks.tensor("dispatch_wait_recv_cost_stats", waited, torch.int64, [ranks], device)
        receive = None
        if not return_recv_hook and waited is None and low.goes_at_once():
            into = communicator.low_latency_dispatch(x, topk_idx)
            if stats is not None:
                stats.add_(into.expert_counts)
        else:
            sent = communicator.send_dispatch(x, topk_idx)
            into = sent.result

            def count() -> None:
                if stats is not None:
                    stats.add_(into.expert_counts)

            receive = low.sent(sent, count, waited)
            if not return_recv_hook:
                receive()
        rows: Rows_t = into.x if into.scales is None else (into.x, into.scales)
        handle = _handles.LowLatencyHandle.of(communicator, into, topk_idx)
        return rows, into.expert_counts, handle, _finished(async_finish), receive if return_recv_hook else None

    @plain
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Brings the experts' results back and sums them for each token, weighted.

        Args:
            x: bf16 ``[local experts, ranks * max tokens, hidden]``, in the order of the received rows.
            topk_idx: int64 ``[tokens, topk]``, that of the dispatch.
            topk_weights: f32 ``[tokens, topk]``.
            zero_copy: results were written to :meth:`get_next_low_latency_combine_buffer`; ``x`` is not read.
            out: bf16 ``[tokens, hidden]`` for the sums.
            combine_wait_recv_cost_stats: int64 ``[ranks]``, to which nanoseconds waited for each rank are added.

        Returns:
            bf16 ``[tokens, hidden]``; an event; the hook, or None.
        """
        self._check_low_latency_mode()
        _checks.hook(async_finish, return_recv_hook)
        if use_logfmt:
            raise errors.Unsupported("use_logfmt is not supported: leave it out, results return as bf16")
        made = _handles.low_latency(handle)
        communicator, native = made.communicator, made.native
        _checks.topk_idx(topk_idx)
        device = communicator.device
        _checks.tensor("topk_idx", topk_idx, torch.int64, [native.tokens, communicator.topk], device)
        _checks.tensor("topk_weights", topk_weights, torch.float32, [native.tokens, communicator.topk], device)
        if device.type == "cpu" and not torch.equal(topk_idx, made.topk_idx):
            raise errors.InvalidArgument("topk_idx differs from that of the dispatch, allowed: the same")
        waited = combine_wait_recv_cost_stats
        if waited is not None:
            _checks.tensor("combine_wait_recv_cost_stats", waited, torch.int64, [self.group_size], device)
        low = self._low_of(communicator)
        y = low.zero_copy_buffer() if zero_copy else x
        if not return_recv_hook and waited is None and low.goes_at_once():
            sums = communicator.low_latency_combine(y, native, topk_weights, out=out)
            return sums, _finished(async_finish), None
        sent = communicator.send_combine(y, native, topk_weights, out=out)
        receive = low.sent(sent, lambda: None, waited)
        if not return_recv_hook:
            receive()
        return sent.result, _finished(async_finish), receive if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> torch.Tensor:
        """bf16 ``[local experts, ranks * max tokens, hidden]`` to write the experts' results to, for ``zero_copy``."""
        self._check_low_latency_mode()
        return self._low_of(_handles.low_latency(handle).communicator).zero_copy_buffer()

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Goes on without a rank in low latency. Needs ``enable_shrink``.

        Raises:
            NotImplementedError: to unmask one rank; :meth:`low_latency_clean_mask_buffer` brings all together again.
        """
        self._check_shrink()
        if not 0 <= rank_to_mask < self.group_size or rank_to_mask == self.rank:
            raise errors.InvalidArgument(
                f"rank_to_mask is {rank_to_mask}, allowed: another rank, 0 to {self.group_size - 1}"
            )
        if mask:
            self._mask(rank_to_mask)
        elif rank_to_mask in self._communicators.masked:
            raise errors.Unsupported(
                "unmasking one rank is not supported: call low_latency_clean_mask_buffer on all ranks"
            )

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes int32 ``[ranks]``: 1 for masked ranks, else 0. Needs ``enable_shrink``."""
        self._check_shrink()
        _checks.tensor("mask_status", mask_status, torch.int32, [self.group_size], mask_status.device)
        masked = [int(rank in self._communicators.masked) for rank in range(self.group_size)]
        mask_status.copy_(torch.tensor(masked, dtype=torch.int32, device="cpu"))

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks all ranks: all of them call it, masked ones too. What was under way is gone. Needs ``enable_shrink``."""
        self._check_shrink()
        for communicator in self._communicators.all_low():
            communicator.rejoin()
            self._low_of(communicator).under_way.clear()
        self._communicators.masked.clear()

    # Inside.

    def _normal(self, device: torch.device, experts: int, topk: int, hidden: int, element: Element) -> Communicator:
        self._communicators.multiprocessors = Buffer.num_sms
        return self._communicators.normal(device, experts, topk, hidden, element)

    def _low_of(self, communicator: Communicator) -> LowLatency:
        low = self._low.get(communicator)
        if low is None:
            low = self._low[communicator] = LowLatency(communicator, self.enable_shrink, self._mask)
        return low

    def _mask(self, rank: int) -> None:
        self._communicators.masked.add(rank)
        for communicator in self._communicators.all_low():
            communicator.mask_rank(rank)

    def _check_low_latency_mode(self) -> None:
        if not self.low_latency_mode:
            raise errors.InvalidArgument("low_latency_mode is False, allowed: a buffer made with low_latency_mode=True")

    def _check_shrink(self) -> None:
        self._check_low_latency_mode()
        if not self.enable_shrink:
            raise errors.InvalidArgument("enable_shrink is False, allowed: a buffer made with enable_shrink=True")


def _finished(async_finish: bool) -> EventOverlap:
    return EventOverlap(EventHandle() if async_finish else None)


def _taken(rows: Rows, received: Received, communicator: Communicator, async_finish: bool) -> Rows_t:
    """Received rows in the form of those that were sent, which may take a copy."""
    taken: Rows_t
    if not async_finish or (rows.scales is None and received.x.is_contiguous()):
        taken = rows.received(received.x, received.scales)
        return taken
    with communicator.order.behind():
        taken = rows.received(received.x, received.scales)
    return taken


def _event(communicator: Communicator, async_finish: bool) -> EventOverlap:
    """After the last call of a communicator."""
    return EventOverlap(EventHandle(communicator.order.event()) if async_finish else None)
