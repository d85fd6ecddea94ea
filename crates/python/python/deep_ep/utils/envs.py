"""How test processes find each other."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


def init_dist(local_rank: int, num_local_ranks: int) -> tuple[int, int, Any]:
    """Joins the default group: NCCL where there are GPUs, one a process, else gloo on CPUs.

    ``MASTER_ADDR``, ``MASTER_PORT`` (127.0.0.1, 8361), ``WORLD_SIZE`` (nodes, 1) and ``RANK`` (this node, 0) say where.

    Returns:
        Rank, number of ranks, and a group of all of them.
    """
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", "8361"))
    nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        backend="nccl" if on_gpus else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda" if on_gpus else "cpu")
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(nodes * num_local_ranks)))
