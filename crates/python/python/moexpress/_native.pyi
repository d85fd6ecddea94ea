"""The compiled part: addresses, sizes and streams. Use :class:`moexpress.Communicator` instead."""

from typing import Any, final

__all__ = [
    "Dispatched",
    "Endpoint",
    "Handle",
    "Layouts",
    "LowDispatched",
    "LowHandle",
    "Meeting",
    "Pending",
    "Place",
    "cuda_is_available",
    "low_latency_bytes",
]

_Capsule = Any
_Scales2 = tuple[int, int, int] | None

def cuda_is_available() -> str | None: ...
def low_latency_bytes(experts: int, topk: int, hidden: int, max_tokens: int, ranks: int) -> int: ...

@final
class Place:
    address: str
    secret: str
    def __new__(cls) -> Place: ...

@final
class Meeting:
    rank: int
    world: int
    def __new__(
        cls, rank: int, world: int, address: str, secret: str, seconds: float, place: Place | None = None
    ) -> Meeting: ...
    def all_gather(self, bytes: bytes, seconds: float) -> list[bytes | None]: ...
    def barrier(self, seconds: float) -> None: ...
    def lost(self) -> list[int]: ...
    def close(self) -> None: ...

@final
class Handle:
    rows: int
    tokens: int
    generation: int
    def rank_prefix(self, address: int, len: int) -> None: ...
    def channel_prefix(self, channels: int, address: int, len: int) -> None: ...
    def source_channel_prefix(self, channels: int, source_token: int, address: int, len: int) -> None: ...
    def send_head(self, channels: int, address: int, len: int) -> None: ...

@final
class Dispatched:
    rows: int
    expert_counts: list[int]
    handle: Handle
    def x(self, knows_fp8: bool) -> _Capsule | None: ...
    def scales(self) -> _Capsule | None: ...
    def topk_idx(self) -> _Capsule | None: ...
    def topk_weights(self) -> _Capsule | None: ...
    def source_token(self) -> _Capsule | None: ...
    def source_rank(self) -> _Capsule | None: ...
    def device_rows(self) -> _Capsule | None: ...
    def device_counts(self) -> _Capsule | None: ...

@final
class Layouts:
    def __new__(cls, gpu: int | None = None) -> Layouts: ...
    def compute(
        self,
        stream: int,
        topk_idx: int,
        tokens: int,
        topk: int,
        ranks: int,
        experts: int,
        numbers: int,
        in_rank: int,
    ) -> None: ...

@final
class LowDispatched:
    def x(self, knows_fp8: bool) -> _Capsule | None: ...
    def scales(self) -> _Capsule | None: ...
    def expert_counts(self) -> _Capsule | None: ...
    def segments(self) -> _Capsule | None: ...
    def source_token(self) -> _Capsule | None: ...

@final
class LowHandle:
    tokens: int

@final
class Pending: ...

@final
class Endpoint:
    def __new__(
        cls,
        meeting: Meeting,
        backend: str,
        experts: int,
        topk: int,
        hidden: int,
        max_tokens: int,
        element: str,
        placement: str,
        arena_bytes: int | None,
        low_latency: bool,
        seconds: float,
        channels: int | None = None,
        slots: int | None = None,
        gpu: int = 0,
        multiprocessors: int = 0,
    ) -> Endpoint: ...
    def dispatch(
        self,
        stream: int,
        defers: bool,
        x: int,
        tokens: int,
        scales: _Scales2,
        topk_idx: int | None,
        topk_weights: int | None,
        in_rank: int,
        tokens_per_expert: list[int],
        alignment: int,
        worst_rows: int,
        device_counts: bool,
    ) -> Dispatched: ...
    def redispatch(
        self, stream: int, defers: bool, x: int, tokens: int, scales: _Scales2, handle: Handle
    ) -> Dispatched: ...
    def combine(
        self,
        stream: int,
        defers: bool,
        y: int,
        handle: Handle,
        topk_weights: int | None,
        bias: list[int],
    ) -> tuple[_Capsule, _Capsule | None]: ...
    def send_dispatch(
        self, stream: int, defers: bool, x: int, tokens: int, topk_idx: int, topk_weights: int | None
    ) -> tuple[Pending, LowDispatched]: ...
    def receive_dispatch(
        self, stream: int, defers: bool, sent: Pending, into: LowDispatched, stats: int | None, tokens: int
    ) -> LowHandle: ...
    def low_dispatch(
        self,
        stream: int,
        defers: bool,
        x: int,
        tokens: int,
        topk_idx: int,
        topk_weights: int | None,
        stats: int | None,
    ) -> tuple[LowHandle, LowDispatched]: ...
    def low_combine(
        self, stream: int, defers: bool, y: int, handle: LowHandle, topk_weights: int | None, into: int
    ) -> None: ...
    def send_combine(
        self, stream: int, defers: bool, y: int, handle: LowHandle, topk_weights: int | None
    ) -> Pending: ...
    def receive_combine(self, stream: int, defers: bool, sent: Pending, into: int) -> None: ...
    def mask_rank(self, rank: int) -> None: ...
    def recover(self, mask: list[int]) -> None: ...
    def mask(self) -> list[int]: ...
    def low_latency_mask(self) -> list[int]: ...
    def stats(self) -> dict[str, Any]: ...
    def window_bytes(self) -> int: ...
    def stream(self) -> int: ...
    def close(self) -> None: ...
