"""One rank of a communicator, with tensors."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.dlpack import from_dlpack

from . import _check, _exit, _native, errors
from ._halves import Landing, LowCombine, LowDispatch
from ._libraries import load_nvrtc
from ._meeting import Meeting, default_timeout
from ._order import CudaOrder, HostOrder, Order
from ._plain import plain
from ._results import Combined, LowReceived, Received

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Element = Literal["bf16", "fp8", "fp8-pow2", "fp8-ue8m0"]
"""How rows of a dispatch travel. The FP8 forms have a scale for every 128 elements: f32; f32 powers of two; UE8M0 bytes."""

GROUP = 128
"""Elements that share a scale."""

UNIT = 16
"""Bytes that a GPU's rows are moved in."""


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Communicator:
    """One rank of a communicator: throughput and low-latency dispatch and combine.

    All ranks of the group make one with the same arguments, and then the same calls in the same order. Calls wait without Python's
    lock and answer Ctrl-C; every wait ends by the timeout.

    Args:
        group: a :class:`Meeting`, or a ``torch.distributed`` group (None: the default one).
        experts: experts in all; expert ``e`` lives on rank ``e // (experts / ranks)``.
        topk: experts chosen per token, at most 32.
        hidden: elements of a row.
        max_tokens: bound on the tokens of one rank for low latency and ``worst_rows``; other dispatches take any number.
        element: how rows of a dispatch travel.
        device: ``cpu``, or a CUDA device of this host. Default: the current CUDA device if the CUDA backend can run, else ``cpu``.
        low_latency: room for low latency.
        placement: ``direct`` puts rows at their final place where the arena has room, ``ring`` bounds memory by the rings.
        arena_bytes: bytes of the arena. Default: room for two worst batches of ``max_tokens``, at most 1 GiB.
        timeout: seconds that one operation may take, a peer's slow experts included. Default: ``MOEXPRESS_TIMEOUT``, or 100.
        channels, slots: rings of each pair of ranks, and their rows. Default: chosen by size.
        multiprocessors: of a GPU that kernels occupy. Default: 24.

    Raises:
        errors.InvalidArgument: a size outside its limits, or one that differs between ranks.
        errors.Unsupported: what is missing: a driver, a GPU, memory.
    """

    rank: int
    """This rank."""
    ranks: int
    """Ranks of the communicator."""
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
        placement: Literal["direct", "ring"] = "direct",
        arena_bytes: int | None = None,
        timeout: float | None = None,
        channels: int | None = None,
        slots: int | None = None,
        multiprocessors: int | None = None,
    ) -> None:
        self.device = _device(device)
        self._shares_meeting = isinstance(group, Meeting)
        self.meeting = group if isinstance(group, Meeting) else Meeting(group, timeout=timeout)
        self.rank, self.ranks = self.meeting.rank, self.meeting.world
        self.experts, self.topk, self.hidden, self.max_tokens = experts, topk, hidden, max_tokens
        self.element: Element = element
        self.low_latency = low_latency
        self.timeout = default_timeout() if timeout is None else timeout
        sizes = {"experts": experts, "topk": topk, "hidden": hidden, "max_tokens": max_tokens}
        for name, size in sizes.items():
            if not 0 < size < 1 << 31:
                raise _check.invalid(name, size, "1 to 2147483647")
        # Said before memory is taken: a difference is named, on all ranks.
        self.meeting.agree(
            {
                "device": self.device.type,
                **sizes,
                "element": element,
                "low_latency": low_latency,
                "placement": placement,
                "arena_bytes": arena_bytes,
                "channels": channels,
                "slots": slots,
            }
        )
        self.native = _native.Endpoint(
            self.meeting._native,
            "cuda" if self.device.type == "cuda" else "host",
            experts,
            topk,
            hidden,
            max_tokens,
            element,
            placement,
            arena_bytes,
            low_latency,
            self.timeout,
            channels,
            slots,
            self.device.index or 0,
            multiprocessors or 0,
        )
        self.local_experts = experts // self.ranks
        stream = self.native.stream()
        self.order: Order = CudaOrder(stream, self.device) if self.device.type == "cuda" else HostOrder()
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
        worst_rows: int = 0,
        device_counts: bool = False,
    ) -> Received:
        """Sends each row to the ranks that hold its experts, once to each rank.

        Args:
            x: ``[tokens, hidden]``, bf16, or float8_e4m3fn with ``scales``. Each rank has its own number of tokens, 0 too.
            topk_idx: int64 ``[tokens, topk]``: the router's choices, -1 for a dropped one. No token names an expert twice.
            topk_weights: f32 ``[tokens, topk]``, carried to the receiver. Default: ones.
            scales: ``[tokens, scales]``, f32, or int32 with four UE8M0 bytes each; any strides.
            alignment: per-expert counts are rounded up to a multiple of this. Rows do not move.
            worst_rows: rows to make room for instead of the exact number; if more come, that is an error on all ranks. Rows beyond
                those that came have ``topk_idx`` -1.
            device_counts: counts stay in the GPU's memory, so that the host waits for nothing and the call can be captured into a
                CUDA graph. Needs ``worst_rows``.
        """
        tokens = self._rows("x", x, scales)
        scales = self._by_row(x, scales)
        _check.tensor("topk_idx", topk_idx, torch.int64, [tokens, self.topk], self.device)
        if topk_weights is not None:
            _check.tensor("topk_weights", topk_weights, torch.float32, [tokens, self.topk], self.device)
        out = self.native.dispatch(
            self.order.on(x, scales, topk_idx, topk_weights),
            x.data_ptr(),
            tokens,
            _scales(scales),
            topk_idx.data_ptr(),
            _address(topk_weights),
            0,
            [],
            alignment,
            worst_rows,
            device_counts,
        )
        return Received(out)

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
    ) -> Received:
        """A dispatch whose routing was computed elsewhere; rows carry no choices.

        Args:
            in_rank: bool ``[tokens, ranks]``: where each token goes.
            tokens_per_expert: ``[experts]``: tokens of this batch for each expert.
        """
        tokens = self._rows("x", x, scales)
        scales = self._by_row(x, scales)
        _check.tensor("in_rank", in_rank, (torch.bool, torch.uint8), [tokens, self.ranks], self.device)
        out = self.native.dispatch(
            self.order.on(x, scales, in_rank),
            x.data_ptr(),
            tokens,
            _scales(scales),
            None,
            None,
            in_rank.data_ptr(),
            list(tokens_per_expert),
            alignment,
            worst_rows,
            False,
        )
        return Received(out)

    @plain
    def redispatch(self, x: torch.Tensor, handle: _native.Handle, *, scales: torch.Tensor | None = None) -> Received:
        """A *cached* dispatch: another batch along the routing of an earlier one, without exchanging counts."""
        handle = _handle(handle)
        tokens = self._rows("x", x, scales)
        scales = self._by_row(x, scales)
        if tokens != handle.tokens:
            raise _check.invalid("tokens of x", tokens, f"{handle.tokens}, those of the handle's dispatch")
        out = self.native.redispatch(self.order.on(x, scales), x.data_ptr(), tokens, _scales(scales), handle)
        return Received(out)

    @plain
    def combine(
        self,
        y: torch.Tensor,
        handle: _native.Handle,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> Combined:
        """Brings rows back to their tokens' ranks and sums them there, in f32, ranks ascending, rounded to bf16 once.

        Args:
            y: bf16 ``[rows, hidden]``, in the order of the received rows; more rows than the handle has are left out.
            topk_weights: f32 ``[rows, topk]``, summed likewise.
            bias: one or two bf16 ``[tokens, hidden]``, which the sums start from.
        """
        handle = _handle(handle)
        rows = self._results("y", y, handle.rows)
        if topk_weights is not None:
            _check.tensor("topk_weights", topk_weights, torch.float32, [rows, self.topk], self.device)
        biases = [bias] if isinstance(bias, torch.Tensor) else list(bias or [])
        if len(biases) > 2:
            raise _check.invalid("number of biases", len(biases), "at most 2")
        for number, one in enumerate(biases):
            _check.tensor(f"bias {number}", one, torch.bfloat16, [handle.tokens, self.hidden], self.device)
        addresses = [*map(_address, biases), None, None]
        order = self.order.on(y, topk_weights, *biases)
        starts = (addresses[0], addresses[1])
        x, weights = self.native.combine(order, y.data_ptr(), handle, _address(topk_weights), starts)
        return Combined(from_dlpack(x), None if weights is None else from_dlpack(weights))

    # Low latency.

    @plain
    def send_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None = None
    ) -> LowDispatch:
        """The sending half of a low-latency dispatch: posts everything and returns.

        Args:
            x: bf16 ``[tokens, hidden]``, at most ``max_tokens``; cast to FP8 on the way where ``element`` says so.
            topk_idx: as for :meth:`dispatch`.
            topk_weights: where given, each rank weighs and sums its experts' results, and one row a rank comes back; where not,
                one row a choice comes back, and combine is given the weights.
        """
        tokens = self._low_batch(x, topk_idx, topk_weights)
        into = self.low_latency_room()
        # The receiving half may read the rows again.
        self.order.beyond(x)
        order = self.order.on(x, topk_idx, topk_weights)
        sent = self.native.send_dispatch(order, x.data_ptr(), tokens, topk_idx.data_ptr(), _address(topk_weights))
        return LowDispatch(self, sent, x, into)

    @plain
    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None = None
    ) -> LowReceived:
        """Both halves of a low-latency dispatch, on GPUs in one kernel."""
        tokens = self._low_batch(x, topk_idx, topk_weights)
        into = self.low_latency_room()
        rows = Landing(self, into)
        into.handle = self.native.low_dispatch(
            self.order.on(x, topk_idx, topk_weights),
            x.data_ptr(),
            tokens,
            topk_idx.data_ptr(),
            _address(topk_weights),
            *rows.places(),
        )
        rows.landed()
        return into

    @plain
    def send_combine(
        self,
        y: torch.Tensor,
        handle: _native.LowHandle,
        topk_weights: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> LowCombine:
        """The sending half of a low-latency combine.

        Args:
            y: bf16 ``[local experts, ranks * max_tokens, hidden]``, in the order of the received rows.
            topk_weights: f32 ``[tokens, topk]`` of this rank's own tokens; given here if and only if not at dispatch.
            out: bf16 ``[tokens, hidden]`` for the sums. Default: a new tensor.
        """
        out = self._low_sums(y, handle, topk_weights, out)
        # The receiving half may read the results again.
        self.order.beyond(y)
        order = self.order.on(y, topk_weights)
        sent = self.native.send_combine(order, y.data_ptr(), handle, _address(topk_weights))
        return LowCombine(self, sent, y, out)

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
        out = self._low_sums(y, handle, topk_weights, out)
        order = self.order.on(y, topk_weights, out)
        self.native.low_combine(order, y.data_ptr(), handle, _address(topk_weights), out.data_ptr())
        return out

    def low_latency_room(self) -> LowReceived:
        """Memory for what a low-latency dispatch brings."""
        experts, rows, hidden = self._low_shape(self.hidden)
        scales, dtype = None, torch.bfloat16
        if self.element != "bf16":
            groups = -(-hidden // GROUP)
            packed = self.element == "fp8-ue8m0"
            columns = -(-groups // 4) if packed else groups
            kind = torch.int32 if packed else torch.float32
            scales = torch.empty((experts, columns, rows), dtype=kind, device=self.device).transpose(1, 2)
            dtype = torch.float8_e4m3fn

        def room(shape: Sequence[int], kind: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=kind, device=self.device)

        return LowReceived(
            x=room((experts, rows, hidden), dtype),
            scales=scales,
            expert_counts=room((experts,), torch.int32),
            segments=room((experts, self.ranks), torch.int64),
            source_token=room((experts, rows), torch.int32),
            handle=None,
        )

    # Ranks that fail, and what is known of them.

    def mask_rank(self, rank: int) -> None:
        """Goes on without ``rank`` in low latency, until :meth:`rejoin`. Masks are this rank's own."""
        self.native.mask_rank(_rank(rank, self.ranks))

    def rejoin(self) -> None:
        """Brings all ranks together again that were not given up: all of them call it. Handles of before are refused then."""
        self.native.recover([])

    def recover(self, mask: Sequence[int] = ()) -> None:
        """Goes on after a failure, without the ranks of ``mask``: agrees with the other survivors, all of which call it. Tokens for
        experts of masked ranks are dropped from then on; handles of before are refused.

        Raises:
            errors.Excluded: the others gave up on this rank.
        """
        self.native.recover([_rank(rank, self.ranks) for rank in mask])

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
        ``bytes_received`` and ``waited_ns``; ``expert_rows`` ``[local experts]``; ``operations``."""
        return self.native.stats()

    @property
    def window_bytes(self) -> int:
        """Bytes of this rank's window. Memory is used where it is written."""
        return self.native.window_bytes()

    def close(self) -> None:
        """Frees windows and lanes, and leaves the meeting if that is its own. Received tensors stay readable."""
        native = getattr(self, "native", None)
        if native is not None:
            native.close()
            if not self._shares_meeting:
                self.meeting.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside.

    def _rows(self, name: str, x: torch.Tensor, scales: torch.Tensor | None) -> int:
        """Checks rows as they travel; how many."""
        if self.element == "bf16":
            if scales is not None:
                raise _check.invalid("scales", "given", "None, as the communicator was made for bf16")
            return self._results(name, x, None)
        _check.tensor(name, x, torch.float8_e4m3fn, ["tokens", self.hidden], self.device)
        groups = -(-self.hidden // GROUP)
        packed = self.element == "fp8-ue8m0"
        shape = [x.shape[0], -(-groups // 4) if packed else groups]
        kind = torch.int32 if packed else torch.float32
        _check.tensor("scales", scales, kind, shape, self.device, contiguous=False)
        return x.shape[0]

    def _results(self, name: str, y: torch.Tensor, least: int | None) -> int:
        """Checks bf16 rows; how many."""
        # On the path of every call: what is wrong is found out only where something is.
        fits = isinstance(y, torch.Tensor) and y.dtype is torch.bfloat16 and y.dim() == 2 and y.is_contiguous()
        if not fits or y.shape[1] != self.hidden or y.device != self.device:
            _check.tensor(name, y, torch.bfloat16, ["rows", self.hidden], self.device)
        if least is not None and y.shape[0] < least:
            raise _check.invalid(f"rows of {name}", y.shape[0], f"at least {least}, those of the handle")
        return y.shape[0]

    def _low_batch(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None) -> int:
        """Checks a batch of low latency; its tokens."""
        tokens = self._results("x", x, None)
        _check.tensor("topk_idx", topk_idx, torch.int64, [tokens, self.topk], self.device)
        if topk_weights is not None:
            _check.tensor("topk_weights", topk_weights, torch.float32, [tokens, self.topk], self.device)
        return tokens

    def _low_sums(
        self, y: torch.Tensor, handle: _native.LowHandle, topk_weights: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Checks a combine of low latency; where the sums go."""
        if not isinstance(handle, _native.LowHandle):
            raise _check.invalid("handle", f"a {type(handle).__name__}", "one that a low-latency dispatch gave")
        _check.tensor("y", y, torch.bfloat16, self._low_shape(self.hidden), self.device)
        if topk_weights is not None:
            shape = [handle.tokens, self.topk]
            _check.tensor("topk_weights", topk_weights, torch.float32, shape, self.device)
        if out is None:
            return torch.empty((handle.tokens, self.hidden), dtype=torch.bfloat16, device=self.device)
        return _check.tensor("out", out, torch.bfloat16, [handle.tokens, self.hidden], self.device)

    def _low_shape(self, hidden: int) -> tuple[int, int, int]:
        return (self.local_experts, self.ranks * self.max_tokens, hidden)

    def _by_row(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor | None:
        """Scales as the backend takes them: on GPUs those of a row side by side, where codes do not lie at multiples of 16 bytes."""
        if scales is None or self.device.type == "cpu" or scales.stride(1) == 1:
            return scales
        if self.hidden % UNIT == 0 and x.data_ptr() % UNIT == 0:
            return scales
        return scales.clone(memory_format=torch.contiguous_format)

    def _travelling(self) -> torch.Tensor:
        """Memory for low-latency FP8 rows as they travel: codes and scales side by side."""
        experts, rows, _ = self._low_shape(self.hidden)
        return torch.empty((experts, rows, self.native.row_layout()[0]), dtype=torch.uint8, device=self.device)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if _native.cuda_is_available() is None and torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        why = _native.cuda_is_available()
        if why is not None:
            raise errors.Unsupported(f"device {device} is not supported: {why}; use device='cpu'")
        load_nvrtc()
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    elif device.type != "cpu":
        raise _check.invalid("device", device, "cpu or cuda")
    return device


def _scales(scales: torch.Tensor | None) -> tuple[int, int, int] | None:
    return None if scales is None else (scales.data_ptr(), *scales.stride())  # type: ignore[return-value]


def _handle(handle: object) -> _native.Handle:
    if not isinstance(handle, _native.Handle):
        raise _check.invalid("handle", f"a {type(handle).__name__}", "one that a dispatch gave")
    return handle


def _rank(rank: int, ranks: int) -> int:
    if not 0 <= rank < ranks:
        raise _check.invalid("rank", rank, f"0 to {ranks - 1}")
    return rank
