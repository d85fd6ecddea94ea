"""Values that a fuzzer gives to calls: good ones, and ones that are wrong in one way each."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

CANARY = 0x5A
"""Each byte of memory that no call may read or write."""
GUARD = 64
"""Canaries before and after the memory of a tensor."""

NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 3, 7, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, 1 << 64, -(1 << 63), 10**30),
    *(
        10**5000,
        -(10**5000),
        0.0,
        1.0,
        1.5,
        -0.5,
        float("nan"),
        float("inf"),
        "3",
        b"3",
        "",
        None,
        True,
        False,
        [],
        {},
        (),
    ),
    *(object(), [1], torch.tensor(3), torch.tensor([1, 2]), torch.empty(0), int, print),
]
"""What may stand where a number is asked for."""

DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8, torch.uint8),
    *(torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64),
]


class Own(torch.Tensor):
    """A tensor of a class of its own."""


class Values:
    """Draws values, and remembers the guards of tensors that a call may write.

    Args:
        seed: the same seed draws the same values.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._guards: list[tuple[torch.Tensor, int]] = []
        self.tensors: list[torch.Tensor] = []
        """Drawn since the last call began: what another argument may be an alias of."""
        self.memory = True
        """Whether tensors without their memory are drawn, too."""

    def begin(self) -> None:
        """Before the arguments of a call are drawn."""
        self._guards, self.tensors = [], []

    def check(self) -> None:
        """After a call: nothing was written beside the tensors it was given."""
        for guard, bytes in self._guards:
            if guard.untyped_storage().nbytes() == bytes:  # nobody has resized it meanwhile
                assert bool((guard == CANARY).all()), "a call wrote memory beside a tensor"

    def chance(self, part: float) -> bool:
        return self.random.random() < part

    def number(self) -> Any:
        """Anything in the place of a number."""
        return self.random.choice(NUMBERS)

    def good(self, dtype: torch.dtype, shape: tuple[int, ...], fill: Any = 1) -> torch.Tensor:
        """A tensor between guards."""
        count = 1
        for size in shape:
            count *= size
        bytes = count * dtype.itemsize
        memory = torch.full((bytes + 2 * GUARD,), CANARY, dtype=torch.uint8)
        tensor = memory[GUARD : GUARD + bytes].view(dtype).view(shape)
        if isinstance(fill, torch.Tensor):
            tensor.copy_(fill)
        else:
            tensor.fill_(fill)
        self._guards += [(guard, memory.nbytes) for guard in (memory[:GUARD], memory[GUARD + bytes :])]
        self.tensors.append(tensor)
        return tensor

    def choices(self, tokens: int, topk: int, experts: int) -> torch.Tensor:
        """Choices of a router: none twice in a token."""
        rows = [self.random.sample(range(experts), topk) for _ in range(tokens)]
        picked = torch.tensor(rows, dtype=torch.int64).view(tokens, topk)
        if self.chance(0.3):
            picked[:, self.random.randrange(topk)] = -1
        return self.good(torch.int64, (tokens, topk), picked)

    def wrong(self, good: torch.Tensor) -> Any:
        """What is wrong in one way in the place of a tensor."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self.random.choice((WITHOUT_MEMORY if self.memory else []) + WRONG)(self, good)
            except (RuntimeError, ValueError, TypeError, IndexError):  # not every change is possible for every type
                return None


def _resized(bytes: Callable[[int], int]) -> Callable[[Values, torch.Tensor], torch.Tensor]:
    def change(_: Values, good: torch.Tensor) -> torch.Tensor:
        # Memory that was full of canaries, and is somebody else's now.
        other = (
            torch.full((good.nbytes + 64,), CANARY, dtype=torch.uint8)[: good.nbytes].view(good.dtype).view(good.shape)
        )
        other.untyped_storage().resize_(bytes(good.nbytes))
        return other

    return change


def _late(_: Values, good: torch.Tensor) -> torch.Tensor:
    """The second half of a storage that ends in its middle."""
    twice = torch.cat([good.clone(), good.clone()])
    late = twice[good.shape[0] :]
    twice.untyped_storage().resize_(good.nbytes)
    return late


def _unaligned(_: Values, good: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(good.nbytes + 1), dtype=good.dtype, offset=1, count=good.numel()).view(good.shape)


def _read_only(_: Values, good: torch.Tensor) -> torch.Tensor:
    bytes = good.contiguous().view(torch.uint8).flatten().tolist()
    return torch.frombuffer(memoryview(bytearray(bytes)).toreadonly(), dtype=good.dtype).view(good.shape)


def _fake(_: Values, good: torch.Tensor) -> torch.Tensor:
    mode = FakeTensorMode()
    return mode.from_tensor(good)


def _freed_from(_: Values, good: torch.Tensor) -> torch.Tensor:
    """A tensor that shows other memory than it was made with."""
    other = good.clone()
    other.set_(torch.empty(0, dtype=good.dtype))
    return other


WITHOUT_MEMORY: list[Callable[[Values, torch.Tensor], Any]] = [
    _resized(lambda bytes: 0),
    _resized(lambda bytes: bytes // 2),
    _resized(lambda bytes: max(bytes - 1, 0)),
    _late,
    _unaligned,
]
"""Each makes of a good tensor one whose memory is not there."""

WRONG: list[Callable[[Values, torch.Tensor], Any]] = [
    _read_only,
    _fake,
    _freed_from,
    lambda values, good: good.to(values.random.choice(DTYPES)),
    lambda values, good: good[1:],
    lambda values, good: good[:0],
    lambda values, good: good[:, :0],
    lambda values, good: torch.cat([good, good]),
    lambda values, good: good.unsqueeze(0),
    lambda values, good: good.flatten(),
    lambda values, good: good.sum(),
    lambda values, good: good.transpose(0, -1),
    lambda values, good: good.mT.contiguous().mT,
    lambda values, good: good[..., :1].expand(good.shape),
    lambda values, good: good[:1].expand(1 << 12, *good.shape[1:]),
    lambda values, good: good.as_strided(good.shape, [0] * good.dim()),
    lambda values, good: good.to("meta"),
    lambda values, good: good.to_sparse(),
    lambda values, good: good.as_subclass(Own),
    lambda values, good: torch._neg_view(good),
    lambda values, good: torch.nn.Parameter(good.clone()),
    lambda values, good: good.clone().requires_grad_(),
    lambda values, good: torch.full_like(good, float("nan")),
    lambda values, good: torch.full_like(good, values.random.choice([-2, 1 << 40, -(1 << 63), 99])),
    lambda values, good: good.clone().share_memory_(),
    lambda values, good: values.random.choice(values.tensors),
    lambda values, good: (
        values.random.choice(values.tensors).view(good.dtype).flatten()[: good.numel()].view(good.shape)
    ),
    lambda values, good: torch.nested.nested_tensor([good, good]),
    lambda values, good: good.tolist(),
    lambda values, good: (good, good),
    lambda values, good: (good, None),
    lambda values, good: values.number(),
]
"""Each makes of a good tensor one that is wrong in another way."""
