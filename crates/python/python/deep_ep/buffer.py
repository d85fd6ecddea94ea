"""The buffer: DeepEP's entry point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from moexpress import Meeting, errors
from moexpress.adapter import default_timeout, limits

from . import _checks, config
from ._communicators import Communicators
from ._low_latency import LowLatency, element_of, low_latency_hint, ready_of
from ._members import Members
from ._npus import NotServed, none
from ._runtime import MOST_BYTES, LocalMemory, Runtime
from ._taking import Rows_t, ordered
from ._throughput import Dispatched, Throughput
from .config import Config
from .utils import EventHandle, EventOverlap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Buffer(NotServed):
    """Dispatch and combine of the ranks of a group, on one node or several, with DeepEP's arguments and results.

    Nodes are those of :class:`moexpress.Meeting`: of ``LOCAL_WORLD_SIZE`` ranks each, or the ranks of a host. ``MOEXPRESS_FAR`` names what
    carries rows between them, ``roce`` unless it says otherwise.

    Sizes are hints; the logger ``deep_ep`` says where larger ones would help. All ranks make the same calls in the same order; the
    first call with sizes that were not seen before makes a communicator for them. Every wait ends: by ``MOEXPRESS_TIMEOUT`` seconds
    (100 unless it is set).

    Args:
        group: a ``torch.distributed`` group of any backend.
        num_nvl_bytes: least bytes of memory into which rows are placed directly. It grows with the batches that are seen, as far as
            memory is free; batches for which it has no room go through outboxes.
        num_rdma_bytes: bytes that :meth:`get_local_buffer_tensor` gives with ``use_rdma_buffer``; without other effect.
        low_latency_mode: whether low-latency calls may be made.
        allow_nvlink_for_low_latency_mode: whether low latency reaches ranks of the own node through their memory. Without, it sends all
            rows by what carries them between nodes, on one node, too.
        num_qps_per_rank, allow_mnnvl, use_fabric: accepted, without effect. ``meta_addr``, sgl-kernel-npu's for its zbccl: only 0.
        explicitly_destroy: whether :meth:`destroy` will be called. Without, everything is freed when the buffer is and what still
            reads its results has ended, or at exit.
        enable_shrink: low latency goes on without ranks that do not deliver; see the mask methods. On GPUs its calls wait for their
            kernels then.
        comm: an MPI communicator, which counts where ``group`` is None.
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
        meta_addr: int = 0,
    ) -> None:
        if group is None and comm is None:
            raise errors.InvalidArgument("group is None, allowed: a process group, or comm, an MPI communicator")
        none("meta_addr", meta_addr or None, "0: there is no zbccl here")
        self.num_nvl_bytes = limits.number("num_nvl_bytes", num_nvl_bytes, 0, MOST_BYTES)
        self.num_rdma_bytes = limits.number("num_rdma_bytes", num_rdma_bytes, 0, MOST_BYTES)
        self.low_latency_mode = limits.flag("low_latency_mode", low_latency_mode)
        self.explicitly_destroy = limits.flag("explicitly_destroy", explicitly_destroy)
        self.enable_shrink = limits.flag("enable_shrink", enable_shrink)
        by_nvlink = limits.flag("allow_nvlink_for_low_latency_mode", allow_nvlink_for_low_latency_mode)
        timeout = default_timeout()
        meeting = Meeting(group, comm=comm)
        self.group, self.rank, self.group_size = comm if group is None else group, meeting.rank, meeting.world
        self.runtime: Runtime = Runtime(self)
        self._meeting = meeting
        low_ranks_per_node, shrinks = None if by_nvlink else 1, self.enable_shrink
        self._communicators = Communicators(meeting, self.num_nvl_bytes, timeout, low_ranks_per_node, shrinks)
        self._communicators.goes_with(self)
        self._members = Members(self.group_size, meeting.ranks_per_node)
        self._throughput = Throughput(self._communicators, self._members)
        self._low_latency = LowLatency(self._communicators, self.group_size, shrinks)
        self._local = LocalMemory(self.num_nvl_bytes, self.num_rdma_bytes)

    # Of all buffers.

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether FP8 and low latency are there: always."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Multiprocessors that kernels of throughput mode occupy, an even number: of buffers whose first dispatch is still to come."""
        Buffer.num_sms = config.multiprocessors(new_num_sms)

    @staticmethod
    def capture() -> EventOverlap:
        """An event at what the current stream holds now."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """What DeepEP recommends."""
        return config.dispatch_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """What DeepEP recommends."""
        return config.combine_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that low latency takes on each rank for top-8 (or as many experts as there are)."""
        return low_latency_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    # Of one.

    def destroy(self) -> None:
        """Frees everything. All ranks call it.

        Raises:
            AssertionError: the buffer was made without ``explicitly_destroy=True``.
        """
        assert self.explicitly_destroy, "make the buffer with explicitly_destroy=True to destroy it"
        self._low_latency.close()
        self._local.free()
        self._communicators.destroy()
        # What callers tell a destroyed buffer by.
        self.runtime = None  # type: ignore[assignment]

    def recover(self, mask: Sequence[int] = ()) -> None:
        """Goes on after a failure, without the ranks of ``mask``: all others call it. What was under way is gone, and handles of before
        are refused. Over several nodes those of ``mask`` leave with their nodes. Not of DeepEP, whose buffers end with the first failure.

        Raises:
            moexpress.errors.Excluded: the others gave up on this rank.
        """
        mask = _checks.mask(mask, self.group_size)
        self._low_latency.clear()
        self._communicators.recover(mask)

    def rejoin(self) -> None:
        """Brings all ranks together again in low latency: all of them call it, masked ones too. Not of DeepEP, which has
        :meth:`low_latency_clean_mask_buffer` for buffers with ``enable_shrink``."""
        self._check_low_latency_mode()
        self._low_latency.rejoin()

    def stats(self) -> dict[str, int]:
        """Rows by the way they took, of all communicators. Of throughput mode: ``rows_placed`` and ``rows_through_rings`` of dispatches,
        ``results_pulled`` and ``results_through_rings`` of combines (on CPUs results always return through rings), outboxes counted as
        rings. Of low latency, V2's small batches among it: ``rows_by_low_latency``, of dispatches and combines together. And
        ``arena_bytes``, those of the arenas. Not of DeepEP."""
        return self._communicators.stats()

    def trim(self) -> None:
        """Lets go, some three seconds later, of memory that no result has by now and the next batches do not need, where arenas come and go: on GPUs of one
        node. Without it, that goes when a later call has come. Whatever still reads results that are gone is on the current stream, or on
        one that this waits for, as at any call. Not of DeepEP."""
        self._communicators.trim()

    def get_comm_stream(self) -> torch.Stream:
        """A stream that calls come behind, and that comes behind calls, as soon as it was asked for; the same each time. CUDA only."""
        return self._communicators.stream()

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Memory for the caller's own use, of ``num_rdma_bytes`` or else ``num_nvl_bytes``: the same each time. No call of this buffer
        reads or writes it, so that nothing has to be cleaned afterwards. It is taken at the first request.

        Args:
            size: of the tensor; default: all elements from ``offset`` on.
            offset: bytes before the tensor.
        """
        self._communicators.check_open()
        return self._local.tensor(self._communicators.device, dtype, size, offset, use_rdma_buffer)

    # Throughput mode.

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
            topk_idx: int64 or int32 ``[tokens, topk]``, -1 for a dropped choice.
            num_experts: experts in all.

        Returns:
            int32 ``[ranks]`` tokens for each rank; int32 ``[nodes]`` tokens for each node, or None on one; int32 ``[experts]`` tokens for
            each expert; bool ``[tokens, ranks]`` membership; an event, if asynchronous.
        """
        self._communicators.check_open()
        defer, previous = ordered(previous_event, async_finish, allocate_on_comm_stream)
        previous.here()
        per_rank, per_expert, in_rank = self._members.of(topk_idx, num_experts)
        per_node = self._members.of_nodes(in_rank)
        return per_rank, per_node, per_expert, in_rank, EventOverlap(EventHandle() if defer else None)

    def dispatch(
        self,
        x: Rows_t,
        handle: Sequence[Any] | None = None,
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
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> Dispatched:
        """Sends each row to the ranks that hold its experts, once to each rank.

        Args:
            x: bf16 ``[tokens, hidden]``, or float8_e4m3fn ``[tokens, hidden]`` with scales ``[tokens, scales]``, f32 or int32; on CPUs and NPUs
                int8 with scales ``[tokens]``, too.
            handle: of an earlier dispatch, whose routing is used again: a cached dispatch. Its tensors in a tuple or list will do.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert: from :meth:`get_dispatch_layout`.
            topk_idx: int64 or int32 ``[tokens, topk]``, with ``topk_weights`` f32 ``[tokens, topk]``: both or neither.
            expert_alignment: counts for each expert are rounded up to a multiple of this.
            num_worst_tokens: rows to make room for, the same on all ranks; then no count comes to the host, and the list of counts is empty.
            config: checked; ``docs/python.md`` says what each of its sizes does.
            dispatch_wait_recv_cost_stats: sgl-kernel-npu's; only None.

        Returns:
            Rows (in the form of ``x``); local expert of each choice, or -1; its weight; counts for each local expert; the handle;
            an event, if asynchronous. A cached dispatch returns None for all but the rows and the event.
        """
        if config is not None:
            _checks.config(config)
        none("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, "low_latency_dispatch's, on CPUs and GPUs")
        defer, previous = ordered(previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise errors.InvalidArgument("topk_idx is given with a handle, allowed: None in a cached dispatch")
            return self._throughput.redispatch(x, handle, config, defer, previous)
        self._communicators.multiprocessors = Buffer.num_sms
        return self._throughput.dispatch(
            x,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            Buffer.num_sms if config is None else config.num_sms,
            config,
            defer,
            previous,
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: Sequence[Any],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        combine_send_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Brings rows back and sums them for each token, unweighted, in f32, ranks ascending, rounded to bf16 once; over several nodes
        each node's sum is rounded, too, before it travels.

        Args:
            x: bf16 ``[rows, hidden]``, in the order of the received rows.
            handle: of the dispatch.
            topk_weights: f32 ``[rows, topk]``, summed likewise.
            bias: one or two bf16 ``[tokens, hidden]`` that the sums start from; of two either may be None.
            config: checked; ``docs/python.md`` says what each of its sizes does.
            combine_send_cost_stats: sgl-kernel-npu's; only None.

        Returns:
            bf16 ``[tokens, hidden]``; f32 ``[tokens, topk]`` or None; an event, if asynchronous.
        """
        if config is not None:
            _checks.config(config)
        none("combine_send_cost_stats", combine_send_cost_stats, "low_latency_combine's, on CPUs and GPUs")
        defer, previous = ordered(previous_event, async_finish, allocate_on_comm_stream)
        return self._throughput.combine(x, handle, topk_weights, bias, config, defer, previous)

    def internode_dispatch(
        self,
        x: Rows_t,
        handle: Sequence[Any] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        num_worst_tokens: int = 0,
    ) -> Dispatched:
        """:meth:`dispatch`, which is the same over several nodes. Refused on one."""
        self._check_several_nodes("internode_dispatch", "dispatch")
        return self.dispatch(
            x,
            handle,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )

    def internode_combine(
        self,
        x: torch.Tensor,
        handle: Sequence[Any],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """:meth:`combine`, which is the same over several nodes. Refused on one."""
        self._check_several_nodes("internode_combine", "combine")
        return self.combine(
            x, handle, topk_weights, bias, config, previous_event, async_finish, allocate_on_comm_stream
        )

    # Low latency.

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing: low latency leaves nothing behind that would have to be cleaned."""
        self._check_low_latency_mode()

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
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[Rows_t, torch.Tensor, Sequence[Any], EventOverlap, Callable[[], None] | None]:
        """Sends each row to its experts' ranks, cast to FP8 on the way where asked for.

        Args:
            x: bf16 ``[tokens, hidden]``, at most ``num_max_dispatch_tokens_per_rank`` tokens.
            topk_idx: int64 or int32 ``[tokens, topk]``, -1 for a dropped choice.
            num_max_dispatch_tokens_per_rank: the same on all ranks.
            cumulative_local_expert_recv_stats: int32 ``[local experts]``, to which received rows are added.
            dispatch_wait_recv_cost_stats: int64 ``[ranks]``, to which nanoseconds waited for each rank are added; on CPUs alone.
            use_fp8: FP8 rows with a scale for each 128 elements, on NPUs INT8 rows with a scale each; else bf16.
            round_scale: scales are powers of two.
            use_ue8m0: and stored as UE8M0, four in an int32. Needs ``round_scale``.
            return_recv_hook: return once everything is sent; calling the hook receives.
            topk_weights: sgl-kernel-npu's; not read, as the combine has them.

        Returns:
            ``[local experts, ranks * max tokens, hidden]`` rows, with FP8 a tuple with scales ``[local experts, ranks * max tokens,
            hidden / 128]`` f32 or ``[.., hidden / 512]`` int32, column-major; int32 ``[local experts]`` rows of each; the handle; an
            event; the hook, or None.
        """
        self._check_low_latency_mode()
        async_finish, return_recv_hook = _checks.hook(async_finish, return_recv_hook)
        return self._low_latency.dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            element_of(use_fp8, round_scale, use_ue8m0),
            async_finish,
            return_recv_hook,
        )

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Sequence[Any],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        *,
        overlap: bool = False,
        packed_recv_count: torch.Tensor | None = None,
        comp_signal: torch.Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 3,
        src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int = 0,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Brings the experts' results back and sums them for each token, weighted.

        Args:
            x: bf16 ``[local experts, ranks * max tokens, hidden]``, in the order of the received rows.
            topk_idx: int64 or int32 ``[tokens, topk]``, that of the dispatch.
            topk_weights: f32 ``[tokens, topk]``.
            use_logfmt: accepted; results travel as bf16, which is more exact.
            zero_copy: results were written to :meth:`get_next_low_latency_combine_buffer`; ``x`` is not read.
            out: bf16 ``[tokens, hidden]`` for the sums.
            combine_wait_recv_cost_stats: int64 ``[ranks]``, to which nanoseconds waited for each rank are added; on CPUs alone.
            overlap: a kernel of another stream is still making ``x``, and adds to ``comp_signal`` for each tile. On GPUs of one node.
            packed_recv_count: accepted; the handle knows how many rows there are.
            comp_signal: int32, one for each ``block_m`` rows of a local expert, zero before that kernel begins.
            threshold: what the signal of a block has reached when its rows are there.
            num_sms: multiprocessors that send, while that kernel has the others.
            src_signals: the same as ``comp_signal``, int32 or uint32 ``[local experts]``: one for each expert.
            src_signal_expect_value: what it has reached when the expert's rows are there.

        Returns:
            bf16 ``[tokens, hidden]``; an event; the hook, or None.
        """
        self._check_low_latency_mode()
        async_finish, return_recv_hook = _checks.hook(async_finish, return_recv_hook)
        return self._low_latency.combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            limits.flag("zero_copy", zero_copy),
            out,
            combine_wait_recv_cost_stats,
            async_finish,
            return_recv_hook,
            ready_of(
                overlap,
                packed_recv_count,
                comp_signal,
                block_m,
                threshold,
                num_sms,
                src_signals,
                src_signal_expect_value,
            ),
        )

    def get_next_low_latency_combine_buffer(self, handle: Sequence[Any]) -> torch.Tensor:
        """bf16 ``[local experts, ranks * max tokens, hidden]`` to write the experts' results to, for ``zero_copy``."""
        self._check_low_latency_mode()
        return self._low_latency.combine_buffer(handle)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Goes on without a rank in low latency, or with ``mask=False`` with it again. Needs ``enable_shrink``.

        A mask is this rank's own. To unmask a rank all ranks call this that take part, that one too: what was under way is gone then,
        and handles of before are refused.
        """
        self._check_shrink()
        rank = limits.number("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        if not limits.flag("mask", mask):
            self._low_latency.unmask(rank)
        elif rank != self.rank:
            self._communicators.mask(rank)
        else:
            raise limits.invalid("rank_to_mask", rank, f"another rank, 0 to {self.group_size - 1}")

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes int32 ``[ranks]``: 1 for masked ranks, else 0. Needs ``enable_shrink``."""
        self._check_shrink()
        _checks.whole("mask_status", mask_status)
        _checks.tensor("mask_status", mask_status, torch.int32, (self.group_size,), mask_status.device)
        masked = self._communicators.masked()
        told = [int(rank in masked) for rank in range(self.group_size)]
        with torch.inference_mode():  # where the caller may have made it
            mask_status.copy_(torch.tensor(told, dtype=torch.int32, device="cpu"))

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks all ranks: all of them call it, masked ones too. What was under way is gone. Needs ``enable_shrink``."""
        self._check_shrink()
        self._low_latency.rejoin()

    # Inside.

    def _check_several_nodes(self, name: str, instead: str) -> None:
        if self._meeting.nodes == 1:
            raise errors.Unsupported(
                f"{name} is not supported on one node, where all {self.group_size} ranks are: use {instead}"
            )

    def _check_low_latency_mode(self) -> None:
        if not self.low_latency_mode:
            raise errors.InvalidArgument("low_latency_mode is False, allowed: a buffer made with low_latency_mode=True")
        self._communicators.check_open()

    def _check_shrink(self) -> None:
        self._check_low_latency_mode()
        if not self.enable_shrink:
            raise errors.InvalidArgument("enable_shrink is False, allowed: a buffer made with enable_shrink=True")
