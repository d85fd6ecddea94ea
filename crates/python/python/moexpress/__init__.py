"""Moves tokens to experts and back: dispatch and combine of mixture-of-experts models.

A :class:`Communicator` is one rank of a group of processes, on CPUs, NVIDIA GPUs or Ascend NPUs, of one node or several. The package ``deep_ep`` beside this
one has DeepEP's interface over the same machinery. ``docs/python.md`` in the repository is the manual.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from . import errors
from ._meeting import Meeting
from ._native import cuda_is_available as _cuda_is_available
from .errors import Error

try:
    __version__ = version("moexpress")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0"

__all__ = [
    "ByExpert",
    "Combined",
    "Communicator",
    "Early",
    "Error",
    "LowReceived",
    "Meeting",
    "Ready",
    "Received",
    "autograd",
    "cuda_available",
    "errors",
]


def cuda_available() -> bool:
    """Whether the CUDA backend can run here: a driver is there, and a GPU visible."""
    return _cuda_is_available() is None


def __getattr__(name: str) -> object:
    # Tensors come with torch, which takes seconds to import: errors and versions do not need it.
    if name == "Communicator":
        from ._communicator import Communicator

        return globals().setdefault(name, Communicator)
    if name in ("ByExpert", "Combined", "LowReceived", "Received"):
        from . import _results

        return globals().setdefault(name, getattr(_results, name))
    if name in ("Early", "Ready"):
        from . import _early

        return globals().setdefault(name, getattr(_early, name))
    if name == "autograd":
        return import_module(".autograd", __name__)
    raise AttributeError(f"module 'moexpress' has no attribute {name!r}")
