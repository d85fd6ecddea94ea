"""What tests on GPUs share."""

from __future__ import annotations

from typing import Any

import deep_ep
import moexpress
import oracle
import pytest
import torch
import torch.distributed as dist

GPUS = torch.cuda.device_count() if moexpress.cuda_available() else 0
needs_two = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, there are {GPUS}")
LIMIT = 200.0
"""Seconds: kernels are compiled at first use."""


def device(rank: int) -> torch.device:
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def make_buffer(**options: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, int(1e9), 0, explicitly_destroy=True, **options)


def on(batch: oracle.Batch, where: torch.device) -> oracle.Batch:
    return oracle.Batch(batch.x.to(where), batch.topk_idx.to(where), batch.topk_weights.to(where))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.uint8)
