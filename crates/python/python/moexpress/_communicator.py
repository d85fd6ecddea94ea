"""One rank of a communicator, with tensors."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch

from . import _exit, _far, _limits, _native, _npu, errors
from ._early import Early, Ready
from ._far import Far
from ._libraries import load_kernels
from ._low_latency import LowCombine, LowDispatch, LowLatency, how_rows_lie
from ._meeting import Meeting, default_timeout
from ._npu import Npu, Packed
from ._order import CudaOrder, HostOrder, NpuOrder, Order
from ._plain import plain
from ._results import Combined, LowReceived, Received
from ._shape import Element, Shape
from ._throughput import Throughput, outbox

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Communicator:
    """One rank of a communicator: throughput and low-latency dispatch and combine.

    All ranks of the group make one with the same arguments, and then the same calls in the same order. Calls wait without Python's
    lock and answer Ctrl-C; every wait ends by the timeout. Threads take turns, one call at a time; a call from inside another (from a
    signal handler, say), or one whose turn does not come within the timeout, raises ``Busy``. Tensors are checked when a call
    begins: nobody else may resize or write them before it has returned.

    Args:
        group: a :class:`Meeting`, or a ``torch.distributed`` group (None: the default one).
        experts: experts in all; expert ``e`` lives on rank ``e // (experts / ranks)``.
        topk: experts chosen per token, at most 32.
        hidden: elements of a row.
        max_tokens: bound on the tokens of one rank for low latency and ``worst_rows``; other dispatches take any number.
        element: how rows of a dispatch travel.
        device: ``cpu``, a CUDA device of this host, or an NPU (``npu``, ``npu:3``). Default: the current CUDA device if the CUDA backend can
            run, else ``cpu``.
        low_latency: room for low latency.
        low_latency_per_choice: and for combines that bring back a row a choice. Without, it takes less memory, and weights are given at dispatch, or
            rows lie by source.
        placement: ``direct`` puts rows at their final place where the arena has room, ``ring`` bounds memory by the rings,
            ``pulled`` by an outbox that each sender has and receivers pull from: much faster than rings on GPUs; one node only.
        arena_bytes: bytes of the arena. Default: room for two worst batches of ``max_tokens``, at most 1 GiB.
        arena_at_first: on GPUs of one node, bytes of it that there are at first. The rest of ``arena_bytes`` comes as batches and results that are kept need
            it, and goes some seconds after they are gone: ``stats()["arena_bytes"]`` has what there is. Default: all.
        timeout: seconds that one operation may take, a peer's slow experts included. Default: ``MOEXPRESS_TIMEOUT``, or 100.
        channels, slots: rings of each pair of ranks, and their rows. Default: chosen by size.
        outboxes: with ``direct`` placement: a batch for which some rank's arena has no room goes through outboxes of so many channels, as
            with ``pulled``, and so do the calls along its handle. Default: none, rows without room go through rings. One node only.
        multiprocessors: of a GPU that kernels occupy. Default: 24.
        ranks_per_node: ranks of a node; see :class:`Meeting`. Of one that is given, a divisor of its nodes' size: then fewer ranks reach
            each other's memory than could.
        far: what carries rows between nodes: ``roce``, ``ibgda`` (GPUs only) or, between processes of one host, ``loop`` (not of NPUs). Default:
            ``MOEXPRESS_FAR``, or ``roce``. On one node nothing does.
        far_devices: the adapters of a node's ranks, in turn: ``mlx5_0,mlx5_1``. Default: ``MOEXPRESS_FAR_DEVICES``, or all active ports in turn.
            Refused with ``loop``, which has none.
        wait_for_kernels: on GPUs, whether a call returns when its kernels have ended, and raises what failed in them. Without, it returns
            once they are enqueued, and a later call raises. CPUs and NPUs wait in any case.

    Raises:
        errors.InvalidArgument: an argument outside its limits, or one that differs between ranks.
        errors.Unsupported: what is missing: a driver, a GPU, an adapter between nodes.
        errors.Broken: what the driver or the system refuses, as memory.
    """

    rank: int
    """This rank."""
    ranks: int
    """Ranks of the communicator."""
    ranks_per_node: int
    """Ranks of each of its nodes."""
    device: torch.device
    """Where its tensors are."""

    def __init__(
        self,
        group: Meeting | ProcessGroup | None = None,
        *,
        experts: int,
        topk: int,
        hidden: int,
        max_tokens: int = 4096,
        element: Element = "bf16",
        device: torch.device | str | None = None,
        low_latency: bool = False,
        low_latency_per_choice: bool = True,
        placement: Literal["direct", "ring", "pulled"] = "direct",
        arena_bytes: int | None = None,
        arena_at_first: int | None = None,
        timeout: float | None = None,
        channels: int | None = None,
        slots: int | None = None,
        outboxes: int | None = None,
        multiprocessors: int | None = None,
        ranks_per_node: int | None = None,
        far: Far | None = None,
        far_devices: str | None = None,
        wait_for_kernels: bool = False,
    ) -> None:
        sizes = {"experts": experts, "topk": topk, "hidden": hidden, "max_tokens": max_tokens}
        sizes = {name: _limits.number(name, size, 1, (1 << 31) - 1) for name, size in sizes.items()}
        experts, topk, hidden, max_tokens = sizes.values()
        low_latency = _limits.flag("low_latency", low_latency)
        low_latency_per_choice = _limits.flag("low_latency_per_choice", low_latency_per_choice)
        wait_for_kernels = _limits.flag("wait_for_kernels", wait_for_kernels)
        for name, value in {"element": element, "placement": placement}.items():
            _limits.name(name, value)
        arena_bytes = _limits.some("arena_bytes", arena_bytes, 0, (1 << 63) - 1)
        arena_at_first = _limits.some("arena_at_first", arena_at_first, 0, (1 << 63) - 1)
        channels, slots = _limits.some("channels", channels), _limits.some("slots", slots)
        outboxes = _limits.some("outboxes", outboxes)
        multiprocessors = 0 if multiprocessors is None else _limits.number("multiprocessors", multiprocessors)
        self.timeout = default_timeout() if timeout is None else _limits.seconds("timeout", timeout)
        self.device, npu = _device(device)
        kind = "npu" if npu else self.device.type
        self._shares_meeting = isinstance(group, Meeting)
        far, far_devices = _far.chosen(far, far_devices)
        if isinstance(group, Meeting):
            self.meeting = group
        else:
            self.meeting = Meeting(group, timeout=timeout, ranks_per_node=ranks_per_node)
        self.rank, self.ranks = self.meeting.rank, self.meeting.world
        self.ranks_per_node = _of_a_node(ranks_per_node, self.meeting)
        several = self.ranks_per_node < self.ranks
        self.experts, self.topk, self.hidden, self.max_tokens = experts, topk, hidden, max_tokens
        self.element: Element = element
        self.low_latency = low_latency
        self.arena_grows = arena_at_first is not None
        """Whether memory of the arena comes and goes."""
        # Said before memory is taken: a difference is named, on all ranks.
        self.meeting.agree(
            {
                "device": kind,
                **sizes,
                "element": element,
                "low_latency": low_latency,
                "low_latency_per_choice": low_latency_per_choice,
                "placement": placement,
                "arena_bytes": arena_bytes,
                "arena_at_first": arena_at_first,
                "channels": channels,
                "slots": slots,
                "outboxes": outboxes,
                "ranks_per_node": self.ranks_per_node,
                "far": far if several else None,
                "far_devices": far_devices if several else None,
            }
        )
        try:
            self.native = _native.Endpoint(
                self.meeting._native,
                "host" if kind == "cpu" else kind,
                sizes,
                {
                    "element": element,
                    "placement": placement,
                    "arena_bytes": arena_bytes,
                    "arena_at_first": arena_at_first,
                    "low_latency": low_latency,
                    "low_latency_per_choice": low_latency_per_choice,
                    "seconds": self.timeout,
                    "channels": channels,
                    "slots": slots,
                    "outboxes": outboxes,
                    "ranks_per_node": self.ranks_per_node,
                    "far": far,
                    "far_devices": far_devices,
                    "gpu": npu.ordinal if npu else self.device.index or 0,
                    "multiprocessors": multiprocessors,
                    "wait_for_kernels": wait_for_kernels,
                },
            )
        except errors.Error as error:
            if not self._shares_meeting:
                # The others are not to wait for a rank that does not come.
                self.meeting.close()
            if several and far == "roce" and not npu and isinstance(error, errors.Unsupported):
                raise errors.Unsupported(
                    f"{error}; between ranks of one host far='loop' ({_far.FAR}=loop) needs no adapter"
                ) from None
            raise
        shape = Shape(self.ranks, experts, topk, hidden, max_tokens, element, self.device)
        self.local_experts = shape.local_experts
        self.order: Order = HostOrder()
        if npu:
            packed = Packed(npu, hidden) if element == "int8" else None
            self.order, shape.takes_strides = NpuOrder(npu, packed), packed is not None
        elif kind == "cuda":
            self.order = CudaOrder(self.native, self.device)
        self.throughput = Throughput(self.native, self.order, shape)
        self.in_low_latency = LowLatency(self.native, self.order, shape)
        _exit.remember(self)

    # Throughput mode.

    @plain
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        scales: torch.Tensor | None = None,
        alignment: int = 1,
        by_expert: bool = False,
        worst_rows: int = 0,
        device_counts: bool = False,
        zero_spare: bool = False,
        outbox_piece: int | None = None,
        outbox_slots: int | None = None,
    ) -> Received:
        """Sends each row to the ranks that hold its experts, once to each rank.

        Args:
            x: ``[tokens, hidden]`` as ``element`` says: bf16; float8_e4m3fn with ``scales``; or int8 with ``scales``, on CPUs and NPUs. Each
                rank has its own number of tokens, 0 too.
            topk_idx: int64 ``[tokens, topk]``: the router's choices, -1 for a dropped one. No token names an expert twice.
            topk_weights: f32 ``[tokens, topk]``, carried to the receiver. Default: ones.
            scales: of FP8 rows ``[tokens, scales]``, one for every 128 elements: f32, or int32 with four UE8M0 bytes each. Of INT8 rows f32
                ``[tokens, 1]``. Any strides.
            alignment: per-expert counts are rounded up to a multiple of this. Rows do not move, unless they are to be by expert.
            by_expert: rows ready for a grouped GEMM: ``x`` and ``scales`` have a row for each choice. Those of an expert lie side by side,
                by source rank, token and choice; the first of each expert is at a multiple of ``alignment``; what lies between is padding.
                :attr:`Received.by_expert` says where each stands, and :meth:`combine` takes results in the same layout. With
                ``device_counts`` there is room for ``worst_rows * min(topk, local experts) + (alignment - 1) * local experts`` of them,
                rounded up to the alignment; ``worst_rows`` alone is refused. Padding is undefined, unless ``zero_spare`` asks for zeros:
                there may be more of it than rows.
            worst_rows: rows to make room for instead of the exact number; if more come, that is an error on all ranks. Rows beyond
                those that came have ``topk_idx`` -1.
            device_counts: counts stay in the GPU's memory, so that the host waits for nothing and the call can be captured into a
                CUDA graph. Needs ``worst_rows``.
            zero_spare: rows beyond those that came, and their scales, are zeros instead of undefined, by expert all padding; in cached
                dispatches along the handle, too. Needs ``worst_rows`` or ``by_expert``.
            outbox_piece: where rows go through outboxes: rows handed over at a time, at most 32 of them. Ranks may differ. Default: 8, and
                tails and credit are told after a quarter of the slots.
            outbox_slots: likewise, of this rank's rows for each reader: how many lie in an outbox at a time. At least 32 and at most
                :attr:`outbox_slots` of them, whatever is asked for. Default: all.
        """
        return self.throughput.dispatch(
            x,
            topk_idx,
            topk_weights,
            scales=scales,
            alignment=alignment,
            by_expert=by_expert,
            worst_rows=worst_rows,
            device_counts=device_counts,
            zero_spare=zero_spare,
            outbox=outbox(outbox_piece, outbox_slots),
        )

    @plain
    def dispatch_members(
        self,
        x: torch.Tensor,
        in_rank: torch.Tensor,
        tokens_per_expert: Sequence[int],
        *,
        scales: torch.Tensor | None = None,
        alignment: int = 1,
        worst_rows: int = 0,
        outbox_piece: int | None = None,
        outbox_slots: int | None = None,
    ) -> Received:
        """A dispatch whose routing was computed elsewhere; rows carry no choices.

        Args:
            in_rank: bool ``[tokens, ranks]``: where each token goes.
            tokens_per_expert: ``[experts]``: tokens of this batch for each expert.
        """
        return self.throughput.dispatch_members(
            x,
            in_rank,
            tokens_per_expert,
            scales=scales,
            alignment=alignment,
            worst_rows=worst_rows,
            outbox=outbox(outbox_piece, outbox_slots),
        )

    @plain
    def redispatch(
        self,
        x: torch.Tensor,
        handle: _native.Handle,
        *,
        scales: torch.Tensor | None = None,
        outbox_piece: int | None = None,
        outbox_slots: int | None = None,
    ) -> Received:
        """A *cached* dispatch: another batch along the routing of an earlier one, without exchanging counts. What the earlier one said of
        outboxes does not hold for it."""
        said = outbox(outbox_piece, outbox_slots)
        return Received(self.throughput.redispatch(x, handle, scales, outbox=said), self.order)

    @plain
    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """INT8 rows of bf16 ``[rows, hidden]``, as :meth:`dispatch` takes them without a copy: codes ``[rows, hidden]`` and scales
        ``[rows, 1]``. A row's scale is its largest magnitude over 127, and a value is its code times the scale, to the nearest code. Of
        communicators of NPUs with ``element="int8"``; it concerns no other rank."""
        return self.throughput.quantize(x)

    @plain
    def combine(
        self,
        y: torch.Tensor,
        handle: _native.Handle,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        remainder: bool = False,
        outbox_piece: int | None = None,
        outbox_slots: int | None = None,
    ) -> Combined:
        """Brings rows back to their tokens' ranks and sums them there, in f32, ranks ascending, rounded to bf16 once.

        Args:
            y: bf16 ``[rows, hidden]``, in the order of the received rows; more rows than the handle has are left out. Of a dispatch by expert
                one row a choice, as they came: each received row's are summed at their rank, from zero, choices ascending, in f32,
                rounded to bf16, and the sums travel.
            topk_weights: f32 ``[received rows, topk]``, summed likewise; of a dispatch by expert, too.
            bias: one or two bf16 ``[tokens, hidden]``, which the sums start from; of two either may be None.
            remainder: of a dispatch by expert what travels for each received row is not its sum, but what rounding that to bf16 left, rounded likewise. All
                ranks say the same. Not on NPUs.
            outbox_piece, outbox_slots: as of :meth:`dispatch`. A row is summed as soon as its tail was told, so the piece is the step of tails
                and credit alone.
        """
        said = outbox(outbox_piece, outbox_slots)
        return self.throughput.combine(
            y, handle, topk_weights=topk_weights, bias=bias, outbox=said, remainder=remainder
        )

    # Low latency.

    def early(self, rows: int, *, multiprocessors: int | None = None) -> Early:
        """Counters for dispatches whose rows are consumed as they come, on GPUs of one node. docs/python.md says how.

        Args:
            rows: rows of an expert that are counted together, those of a tile of a GEMM for instance.
            multiprocessors: how many the receiving half takes at most. Default: all, and then a consumer mostly begins when it ends.
        """
        return self.in_low_latency.early(rows, multiprocessors)

    @plain
    def send_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        early: Early | None = None,
    ) -> LowDispatch:
        """The sending half of a low-latency dispatch: posts everything and returns.

        Args:
            x: bf16 ``[tokens, hidden]``, at most ``max_tokens``; cast to FP8 on the way where ``element`` says so.
            topk_idx: as for :meth:`dispatch`.
            topk_weights: where given, each rank weighs and sums its experts' results, and one row a rank comes back; where not,
                one row a choice comes back, and combine is given the weights.
            early: counters by which consumers learn of the rows while :meth:`LowDispatch.receive` brings them. The dispatch before with the same
                counters was received, and its consumers are enqueued to the current stream, or to one that it waits for.
        """
        return self.in_low_latency.send_dispatch(x, topk_idx, topk_weights, early=early)

    @plain
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        scales: torch.Tensor | None = None,
        by_source: bool = False,
        packed: int | None = None,
        zero_spare: bool = False,
        host_counts: bool = False,
    ) -> LowReceived:
        """Both halves of a low-latency dispatch, on GPUs in one kernel.

        Args:
            scales: of rows that are given as they travel, as :meth:`dispatch` takes them. Default: ``x`` is bf16. Not on NPUs.
            by_source: each received row lies once, in order of source rank and token, as :meth:`dispatch` brings them, with choices and weights
                beside it. All ranks say the same. A combine takes one result for each row, and sums them in f32, ranks ascending, rounded once.
                Not on NPUs.
            packed: each received row lies once for each of its experts here, those of an expert side by side in order of source rank and token, the
                first at a multiple of this: as :meth:`dispatch` brings them ``by_expert``. What is told by source is told, too, and
                :attr:`LowReceived.slots` says where each choice stands. A combine takes results in the same layout. Without weights it sums those of
                a token at their rank first, in f32, and rounds; with weights they come back choice by choice. All ranks say the same. Not on NPUs.
            zero_spare: with ``packed`` padding is zeros instead of undefined. There may be more of it than rows.
            host_counts: the call waits for the kernel, and the handle knows how many rows came. Not in a capture.
        """
        lies = how_rows_lie(by_source, packed, zero_spare)
        return self.in_low_latency.dispatch(
            x, topk_idx, topk_weights, scales=scales, lies=lies, host_counts=host_counts
        )

    @plain
    def send_combine(
        self,
        y: torch.Tensor,
        handle: _native.LowHandle,
        topk_weights: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        ready: Ready | None = None,
    ) -> LowCombine:
        """The sending half of a low-latency combine.

        Args:
            y: bf16 ``[local experts, ranks * max_tokens, hidden]``, in the order of the received rows; by source and packed ``[rows, hidden]``, at
                least :attr:`LowHandle.result_rows`.
            topk_weights: f32 ``[tokens, topk]`` of this rank's own tokens; given here if and only if not at dispatch, never by source, and packed where
                each choice is to come back by itself.
            out: bf16 ``[tokens, hidden]`` for the sums. Default: a new tensor.
            ready: on GPUs of one node: ``y`` is still being made, by another stream than the current one, and is read as it is ready. Default: what the
                current stream holds makes ``y``.
        """
        return self.in_low_latency.send_combine(y, handle, topk_weights, out, ready)

    @plain
    def low_latency_combine(
        self,
        y: torch.Tensor,
        handle: _native.LowHandle,
        topk_weights: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Both halves of a low-latency combine, on GPUs in one kernel: the weighted sum of each token's results, bf16
        ``[tokens, hidden]``."""
        return self.in_low_latency.combine(y, handle, topk_weights, out)

    # Ranks that fail, and what is known of them.

    def mask_rank(self, rank: int) -> None:
        """Goes on without ``rank`` in low latency, until :meth:`rejoin`. Masks are this rank's own."""
        self.native.mask_rank(_rank(rank, self.ranks))

    def rejoin(self) -> None:
        """Brings all ranks together again that were not given up: all of them call it. Handles of before are refused then.
        Waits for what the current stream holds."""
        self.native.recover((self.order.current(), False), [])

    def recover(self, mask: Sequence[int] = ()) -> None:
        """Goes on after a failure, without the ranks of ``mask``: agrees with the other survivors, all of which call it. Tokens for
        experts of masked ranks are dropped from then on; handles of before are refused. Waits for what the current stream holds, replays of
        graphs among it; let it wait for other streams first on which graphs were replayed.

        Raises:
            errors.Excluded: the others gave up on this rank.
        """
        ranks = _limits.numbers("mask", mask, self.ranks)
        self.native.recover((self.order.current(), False), [_rank(rank, self.ranks) for rank in ranks])

    @property
    def mask(self) -> list[int]:
        """The ranks given up by :meth:`recover`."""
        return self.native.mask()

    @property
    def low_latency_mask(self) -> list[int]:
        """The ranks left out of low latency: masked here, or given up."""
        return self.native.low_latency_mask()

    def stats(self) -> dict[str, Any]:
        """What this rank did since the communicator was made: ``[ranks]`` of ``rows_sent``, ``rows_received``, ``bytes_sent``,
        ``bytes_received`` and ``waited_ns``; ``expert_rows`` ``[local experts]``; ``operations``; and of throughput mode
        ``rows_placed`` and ``rows_through_rings``, received rows of dispatches by the way they took, ``results_pulled`` and
        ``results_through_rings``, results of combines that left here (with counts on the GPU the bound counts). ``outbox_piece`` and
        ``outbox_slots`` say what the last call whose rows went through outboxes used: rows handed over at a time, and rows of this rank
        that lay in an outbox at a time, for all its readers; 0 before the first. ``arena_bytes`` are those of the arena now."""
        return self.native.stats()

    def through_rings(self) -> tuple[int, int]:
        """Rows received, and results that left here, through rings: two of the numbers of :meth:`stats`, at no cost."""
        return self.native.through_rings()

    @property
    def is_arena_full(self) -> bool:
        """Whether the arena has as much as it may have, and, where it grows, something was asked for in vain within the last second."""
        return self.native.is_arena_full()

    @property
    def outbox_slots(self) -> int:
        """Slots of an outbox for each reader, on each channel; 0 where there are none."""
        return self.native.outbox_slots()

    @property
    def window_bytes(self) -> int:
        """Bytes of this rank's window, with what its arena has now. Of a host memory is used where it is written."""
        return self.native.window_bytes()

    def trim(self) -> None:
        """Lets the memory of an arena that grows go, some three seconds later: what no result has by now, and the next batches do not need. Whatever still
        reads results that are gone is on the current stream, or on one that this waits for, as at any call. Without it memory goes when later calls
        have come. Elsewhere it does nothing."""
        self.native.trim((self.order.current(), False))

    def close(self) -> None:
        """Frees windows and lanes, and leaves the meeting if that is its own. Received tensors stay readable. On GPUs it waits up to five
        seconds for what may read results that are gone; their memory goes behind what takes longer.

        A call that is under way in another thread ends and raises ``Closed``. From a signal handler that runs inside a call this returns
        at once, and the call raises ``Closed`` when the handler has returned.
        """
        native = getattr(self, "native", None)
        if native is not None:
            native.close(self.order.last() if hasattr(self, "order") else None)
            if not self._shares_meeting:
                self.meeting.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _device(device: torch.device | str | None) -> tuple[torch.device, Npu | None]:
    """Where tensors are, and the NPU that they are on, if it is one."""
    is_npu, ordinal = _npu.asked_for(device)
    if is_npu:
        npu = _npu.finds(ordinal)
        return npu.device, npu
    if device is None:
        device = "cuda" if _native.cuda_is_available() is None and torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError, OverflowError, ValueError):
        raise _limits.invalid("device", _limits.told(device), "cpu, cuda or npu") from None
    if device.type == "cuda":
        why = _native.cuda_is_available()
        if why is not None:
            raise errors.Unsupported(f"device {device} is not supported: {why}; use device='cpu'")
        load_kernels()
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    elif device.type != "cpu":
        raise _limits.invalid("device", device, "cpu, cuda or npu")
    return device, None


def _of_a_node(ranks_per_node: int | None, meeting: Meeting) -> int:
    """Ranks of a node of a communicator."""
    if ranks_per_node is None:
        return meeting.ranks_per_node
    size = _limits.number("ranks_per_node", ranks_per_node, 1)
    if meeting.ranks_per_node % size:
        allowed = f"a divisor of {meeting.ranks_per_node}, the ranks of a node of the meeting"
        raise _limits.invalid("ranks_per_node", size, allowed)
    return size


def _rank(rank: int, ranks: int) -> int:
    return _limits.number("rank", rank, 0, ranks - 1)
