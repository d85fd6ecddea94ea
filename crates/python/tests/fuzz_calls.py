"""What calls are drawn from: sizes, arguments that are wrong now and then, what earlier calls left behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from fuzz_values import CANARY, Values
from moexpress import _check, errors

EXPERTS, TOPK, HIDDEN, MOST = 4, 2, 128, 6

WRONG = 0.1
"""Share of arguments that are wrong."""

Call = Callable[[], Any]


class Kept(list[Any]):
    """What calls left behind: the latest."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def add(self, what: Any) -> None:
        self.append(what)
        if len(self) > self.most:
            self.pop(0)


class Calls:
    """Draws calls. Each method named after a call draws its arguments and returns it."""

    def __init__(self, values: Values) -> None:
        self.values, self.random = values, values.random
        self.tensors = Kept(24)
        self.changes = True
        """Whether tensors are changed between calls."""
        self.calm = False
        """Whether calls are made side by side: nobody may change a tensor in the middle of another's call."""

    documented: tuple[type[BaseException], ...]
    """What a call may raise."""

    def all(self) -> list[Callable[[], Call]]:
        """Those that take microseconds, each as often as it is to be made."""
        raise NotImplementedError

    def slow(self) -> list[Callable[[], Call]]:
        """Those that meet the other ranks and make something anew, and take milliseconds."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def maybe(self, good: torch.Tensor) -> Any:
        """A tensor, or what is none."""
        return self.values.wrong(good) if self.values.chance(WRONG) else good

    def number(self, *good: Any) -> Any:
        """One of these, or anything."""
        return self.values.number() if self.values.chance(WRONG) else self.random.choice(good)

    def size(self, *good: Any) -> Any:
        """As a number, of something that is made anew for each: seldom wrong."""
        return self.values.number() if self.values.chance(WRONG / 10) else self.random.choice(good)

    def one(self, kept: list[Any], otherwise: Any) -> Any:
        """Something that was kept, of whatever kind now and then."""
        return self.random.choice(kept) if kept and not self.values.chance(WRONG) else otherwise

    def rows(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return self.values.good(dtype, (tokens, HIDDEN), self.random.randrange(1, 9))

    def tokens(self) -> int:
        return self.random.choice((0, 1, MOST - 1, MOST))

    def clean(self, *tensors: Any) -> None:
        """No byte of what came was somebody else's."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.bfloat16:
                assert not bool((tensor.detach().view(torch.int16) == CANARY * 257).any()), "foreign bytes came back"
                self.tensors.add(tensor)

    def changed(self, tensor: Any) -> None:
        """What a caller may do to a tensor at any time between two calls."""
        if self.calm or not self.changes or type(tensor) is not torch.Tensor:
            return
        with suppress(RuntimeError, TypeError, errors.InvalidArgument):
            if tensor.is_shared():  # torch itself dies of a shared storage that is resized
                return
            self.random.choice(
                (
                    lambda: tensor.untyped_storage().resize_(0),
                    lambda: tensor.untyped_storage().resize_(tensor.nbytes // 2),
                    lambda: tensor.resize_(1 << 12),
                    lambda: tensor.set_(torch.empty(0, dtype=tensor.dtype)),
                    lambda: (_check.memory("it", tensor), tensor.fill_(1)),  # torch itself does not look
                )
            )()
