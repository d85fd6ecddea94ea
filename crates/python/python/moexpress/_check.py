"""What tensors must be, said before anything moves: what they claim to be, and that the memory they claim is theirs.

An address is used without a second look, by threads that do not hold Python's lock. So it comes from here only: of a tensor that is
nothing but memory, whose storage holds every element. A storage may be smaller than its tensor (``untyped_storage().resize_(0)`` frees the
memory of a tensor that is to come back, in FSDP for instance): what lies behind it belongs to somebody else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from ._limits import invalid as invalid

Tensor = torch.Tensor
INT64 = torch.int64


def address(name: str, given: object, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> int:
    """Checks a contiguous tensor of exactly this shape; where it lies. 0 where it has no elements.

    Raises:
        errors.InvalidArgument: says what it is and what is allowed.
    """
    # On the path of every call: what is wrong is looked for only where something may be.
    try:
        if (
            (type(given) is Tensor or type(given) is Parameter)
            and given.dtype is dtype
            and given.shape == shape
            and given.device == device
            and given.is_contiguous()
            # Views of complex numbers have that bit, so integers do not.
            and (dtype is INT64 or not given.is_neg())
        ):
            size = dtype.itemsize
            if (given.storage_offset() + given.numel()) * size <= given.untyped_storage().nbytes():
                at = given.data_ptr()
                if at and not at % size:
                    return at
    except RuntimeError:  # has no strides, no storage, ...
        pass
    tensor(name, given, dtype, shape, device)
    return 0


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
    dense(name, given)
    assert isinstance(given, Tensor)
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
    memory(name, given)
    return given


def dense(name: str, given: object) -> None:
    """Refuses what is no tensor, and tensors that are more, or less, than memory with a shape."""
    if not isinstance(given, Tensor):
        raise invalid(name, f"a {type(given).__name__}", "a tensor")
    if type(given) is not Tensor and type(given) is not Parameter:
        raise invalid(name, f"a {type(given).__name__}", "a plain torch.Tensor: its memory may not be its elements")
    if given.layout is not torch.strided or given.is_nested:
        kind = "nested" if given.is_nested else str(given.layout)
        raise invalid(f"layout of {name}", kind, "torch.strided; call .to_dense()")
    if given.is_quantized:
        raise invalid(f"dtype of {name}", f"quantized {given.dtype}", "one that is not quantized; call .dequantize()")
    if given.is_neg() or given.is_conj():
        bit = "negative" if given.is_neg() else "conjugate"
        raise invalid(name, f"a view with its {bit} bit set", "one without; call .resolve_neg() or .resolve_conj()")


def memory(name: str, given: torch.Tensor) -> None:
    """Refuses a dense tensor whose storage does not hold its elements, or not where elements may lie."""
    if given.numel() == 0 or given.device.type == "meta":
        return
    try:
        has, size = given.untyped_storage().nbytes(), given.itemsize
        at = given.data_ptr()
    except RuntimeError:
        raise nowhere(name) from None
    if given.is_contiguous():
        extent = given.numel()
    else:
        extent = 1 + sum((n - 1) * by for n, by in zip(given.shape, given.stride(), strict=True))
    end = given.storage_offset() + extent
    if end * size > has:
        raise invalid(
            f"storage of {name}", f"{has} bytes", f"at least {end * size}; it was resized after the tensor was made"
        )
    if at == 0:
        raise nowhere(name)
    if at % size:
        raise invalid(
            f"address of {name}", f"{at % size} bytes beyond a multiple of {size}", "a multiple; call .clone()"
        )


def nowhere(name: str) -> Exception:
    """Of a tensor that stands for one which a transform has or will have."""
    return invalid(name, "a tensor without storage", "one with memory, outside of vmap and other transforms")


def apart(name: str, written: torch.Tensor, **read: torch.Tensor | None) -> None:
    """Refuses memory that is both written and read by a call: it would be read in the middle of a change. Contiguous tensors."""
    begin, bytes = written.data_ptr(), written.nbytes
    for other, given in read.items():
        if given is not None and begin < given.data_ptr() + given.nbytes and given.data_ptr() < begin + bytes:
            raise invalid(name, f"memory of {other}", "memory of its own; the call writes it while it reads")


class Held:
    """Memory that an operation uses after the call it was given to: kept, and still where it was when that is looked at.

    Args:
        name: in errors.
        tensor: checked. Its storage is kept, whatever becomes of the tensor; only a resize of the storage can free it.
    """

    __slots__ = ("_bytes", "_name", "_shape", "_start", "_storage", "address", "tensor")

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name, self.tensor, self._shape = name, tensor, tensor.shape
        self.address = tensor.data_ptr() if tensor.numel() else 0
        """Where it lies."""
        self._storage = tensor.untyped_storage()
        self._start, self._bytes = self._storage.data_ptr(), self._storage.nbytes()

    def check(self, *, whole: bool = False) -> int:
        """Refuses memory that was freed or resized; where it lies. ``whole``: the tensor must show it, too.

        Raises:
            errors.InvalidArgument: the operation stays to be received; without its memory it can only be dropped.
        """
        if whole and self.tensor.shape != self._shape:
            raise self._changed(f"of shape {list(self.tensor.shape)}")
        if not self.address:
            return 0
        now = self._storage
        if now.data_ptr() != self._start or now.nbytes() != self._bytes:
            raise self._changed("a storage that was resized")
        if whole and (self.tensor.data_ptr() != self.address):
            raise self._changed("a tensor whose memory was replaced")
        return self.address

    def _changed(self, what: str) -> Exception:
        return invalid(self._name, what, "what was given when the operation was sent, until it has been received")
