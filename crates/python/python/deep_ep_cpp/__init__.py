"""The names that callers import from DeepEP's compiled part, V1. ``deep_ep`` has what they stand for."""

from __future__ import annotations

from deep_ep import Buffer as _Buffer
from deep_ep import Config, EventHandle, topk_idx_t

is_sm90_compiled = _Buffer.is_sm90_compiled
get_low_latency_rdma_size_hint = _Buffer.get_low_latency_rdma_size_hint

__all__ = ["Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled", "topk_idx_t"]
