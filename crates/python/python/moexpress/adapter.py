"""What another library's interface over a :class:`moexpress.Communicator` is made of; ``deep_ep`` beside this package is one.

A communicator's ``throughput`` and ``in_low_latency`` make its calls, and can leave it to the caller to wait for them. The rest is how
their arguments are checked, how results become tensors, and how much memory rows take.
"""

from __future__ import annotations

from . import _check as check
from . import _limits as limits
from ._early import Ready
from ._libraries import load_kernels
from ._low_latency import BY_SOURCE, LowCombine, LowDispatch
from ._meeting import default_timeout
from ._native import Handle, LowHandle, Members, block_bytes, low_latency_bytes
from ._order import current_stream
from ._plain import plain
from ._results import tensor_of
from ._shape import GROUP, Element
from ._throughput import OutboxUse

__all__ = [
    "BY_SOURCE",
    "GROUP",
    "Element",
    "Handle",
    "LowCombine",
    "LowDispatch",
    "LowHandle",
    "Members",
    "OutboxUse",
    "Ready",
    "block_bytes",
    "check",
    "current_stream",
    "default_timeout",
    "limits",
    "load_kernels",
    "low_latency_bytes",
    "plain",
    "tensor_of",
]
