"""Calls that torch's function modes leave alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_a_mode_is_on: Callable[[], bool] = getattr(torch._C, "_is_torch_function_mode_enabled", lambda: False)


def plain(call: Callable[P, R]) -> Callable[P, R]:
    """``call`` without function modes. One is on after ``torch.set_default_device``, for instance: every look at the shape of a tensor
    then takes a way through Python, a microsecond each. Tensors made here name their device, so nothing is missed."""

    @wraps(call)
    def without_modes(*arguments: P.args, **named: P.kwargs) -> R:
        if not _a_mode_is_on():
            return call(*arguments, **named)
        with torch._C.DisableTorchFunction():
            return call(*arguments, **named)

    return without_modes
