"""How test processes find each other, and what of their machine DeepEP's callers ask for."""

from __future__ import annotations

import functools
import os
import random
import re
import subprocess
from typing import Any

import torch
import torch.distributed as dist
from moexpress import Meeting

_local_rank = 0
_seeds = {"local": 0, "global": 0}


def init_seed(global_seed: int) -> None:
    """Seeds torch and Python with ``global_seed`` and the rank together."""
    _seeds.update({"global": global_seed, "local": global_seed + dist.get_rank()})
    torch.manual_seed(_seeds["local"])
    random.seed(_seeds["local"])


def get_local_seed() -> int:
    """This rank's seed."""
    return _seeds["local"]


def get_global_seed() -> int:
    """The seed that all ranks were given."""
    return _seeds["global"]


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints, on all ranks or on the first of each node; then all ranks wait for each other."""
    if not once_in_node or _local_rank == 0:
        print(s, flush=True)
    dist.barrier()


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, Any]:
    """Joins the default group: NCCL where there are GPUs, one a process, else gloo on CPUs.

    ``MASTER_ADDR``, ``MASTER_PORT`` (127.0.0.1, 8361), ``WORLD_SIZE`` (nodes, 1) and ``RANK`` (this node, 0) say where.

    Returns:
        Rank, number of ranks, and a group of all of them.
    """
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", "8361"))
    nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    global _local_rank
    _local_rank = local_rank
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
    init_seed(seed)
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(nodes * num_local_ranks)))


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Nodes, and ranks of each, as :class:`moexpress.Meeting` finds them. All ranks call it."""
    meeting = Meeting(group)
    meeting.close()
    return meeting.nodes, meeting.ranks_per_node


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Domains between which rows go in two steps, and ranks of each: the nodes, or one domain without ``allow_hybrid_mode``. All ranks
    call it."""
    return get_physical_domain_size(group) if allow_hybrid_mode else (1, group.size())


def check_nvlink_connections(group: Any) -> None:
    """Does nothing: the communicator finds out by itself which ranks reach each other, and says which do not."""


def check_torch_deterministic() -> None:
    """Does nothing: torch may fill memory with what it likes before a call writes to it."""


@functools.lru_cache
def get_nvlink_gbs(factor: float = 0.9) -> float:
    """GB/s of the first GPU's links, by ``nvidia-smi``, times ``factor``; 0 where there are none."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "nvlink", "-s", "-i", "0"], capture_output=True, text=True, timeout=10
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return factor * sum(float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", told))


def check_fast_rdma_atomic_support(nic_name: str = "mlx5_0") -> bool:
    """False: nothing is asked of an adapter here. What carries rows between nodes finds out by itself whether its adapters have atomics."""
    return False


def get_rdma_gbs(nic_name: str = "mlx5_0") -> float:
    """GB/s of the network: 0, as nothing looks at its rate."""
    return 0
