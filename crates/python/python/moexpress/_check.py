"""What arguments must be, said before anything moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import errors


def invalid(what: str, value: object, allowed: object) -> errors.InvalidArgument:
    """An error in the words of the rest."""
    return errors.InvalidArgument(f"{what} is {value}, allowed: {allowed}")


def tensor(
    name: str,
    given: object,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | str],
    device: torch.device,
    *,
    contiguous: bool = True,
) -> torch.Tensor:
    """Checks a tensor. Names in ``shape`` stand for any size; a number is exact.

    Raises:
        errors.InvalidArgument: says what it is and what is allowed.
    """
    if not isinstance(given, torch.Tensor):
        raise invalid(name, f"a {type(given).__name__}", "a tensor")
    if given.dtype is not dtypes:
        allowed = [dtypes] if isinstance(dtypes, torch.dtype) else dtypes
        if given.dtype not in allowed:
            raise invalid(f"dtype of {name}", given.dtype, " or ".join(map(str, allowed)))
    # A plain loop: this is on the path of every call.
    sizes = given.shape
    fits = len(sizes) == len(shape)
    if fits:
        for size, want in zip(sizes, shape, strict=True):
            if size != want and not isinstance(want, str):
                fits = False
    if not fits:
        raise invalid(f"shape of {name}", list(sizes), "[" + ", ".join(map(str, shape)) + "]")
    if given.device != device:
        raise invalid(f"device of {name}", given.device, f"{device}, that of the communicator")
    if contiguous and not given.is_contiguous():
        raise invalid(f"strides of {name}", list(given.stride()), "contiguous; call .contiguous()")
    return given
