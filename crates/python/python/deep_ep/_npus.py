"""What sgl-kernel-npu's ``deep_ep`` has beside DeepEP's interface, of which this is the part that NPUs decide."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch
from moexpress import errors

from . import _arena

QUANTIZE = "DEEP_NORMAL_MODE_USE_INT8_QUANT"
"""Where it is 1, throughput mode sends bf16 rows of NPUs as INT8."""


def quantizes(x: torch.Tensor) -> bool:
    """Whether bf16 rows travel as INT8."""
    return os.environ.get(QUANTIZE) == "1" and _arena.kind(x.device) == "npu"


def none(name: str, value: object, instead: str) -> None:
    """Refuses an argument that is not served."""
    if value is not None:
        raise errors.Unsupported(f"{name} is not supported: use {instead}")


class NotServed:
    """Calls of sgl-kernel-npu's buffers that are not offered. Each says so."""

    def fused_deep_moe(self, *arguments: Any, **named: Any) -> NoReturn:
        """Not supported."""
        raise errors.Unsupported(
            "fused_deep_moe is not supported: experts are the caller's; use low_latency_dispatch and low_latency_combine around them"
        )

    def get_notify_send_data(self) -> NoReturn:
        """Not supported."""
        raise errors.Unsupported("get_notify_send_data is not supported: use what get_dispatch_layout returns")
