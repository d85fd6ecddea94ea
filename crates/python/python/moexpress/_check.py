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
    shape: tuple[int | str, ...],
    device: torch.device,
    *,
    contiguous: bool = True,
) -> torch.Tensor:
    """Checks a tensor. Names in ``shape`` stand for any size; a number is exact.

    Raises:
        errors.InvalidArgument: says what it is and what is allowed.
    """
    # On the path of every call: what is wrong is looked for only where something may be.
    if (
        isinstance(given, torch.Tensor)
        and given.dtype is dtypes
        and given.shape == shape
        and given.device == device
        and (given.is_contiguous() or not contiguous)
    ):
        return given
    if not isinstance(given, torch.Tensor):
        raise invalid(name, f"a {type(given).__name__}", "a tensor")
    allowed = [dtypes] if isinstance(dtypes, torch.dtype) else dtypes
    if given.dtype not in allowed:
        raise invalid(f"dtype of {name}", given.dtype, " or ".join(map(str, allowed)))
    sizes = given.shape
    if len(sizes) != len(shape) or any(
        size != want and not isinstance(want, str) for size, want in zip(sizes, shape, strict=True)
    ):
        raise invalid(f"shape of {name}", list(sizes), "[" + ", ".join(map(str, shape)) + "]")
    if given.device != device:
        raise invalid(f"device of {name}", given.device, f"{device}, that of the communicator")
    if contiguous and not given.is_contiguous():
        raise invalid(f"strides of {name}", list(given.stride()), "contiguous; call .contiguous()")
    return given
