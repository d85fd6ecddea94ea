"""DeepEP's Python interface (V1 and V2) over moexpress.

On CUDA tensors it runs moexpress's GPU kernels, one process a GPU; on CPU tensors, with a gloo group, its CPU backend, so that the same
model code runs on a laptop. What is not supported raises ``NotImplementedError`` and says what to use instead. ``docs/python.md`` in
the repository has the table.
"""

from __future__ import annotations

import torch

from .buffer import Buffer
from .buffers.elastic import ElasticBuffer, EPHandle
from .config import Config
from .utils import EventHandle, EventOverlap
from .utils.envs import get_logical_domain_size, get_physical_domain_size

topk_idx_t = torch.int64
"""The dtype of ``topk_idx``."""

__version__ = "1.2.1+moexpress"
"""The version of DeepEP whose interface this is."""

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]
