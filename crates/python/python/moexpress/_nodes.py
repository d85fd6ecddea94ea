"""Which ranks of a group share a node, and where they meet: what each tells of its place, and what all of them make of that."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from . import _limits, errors

SOMEWHERE = "192.0.2.1"
"""An address that nobody has: the way to it is the way to other machines."""


def told(rank: int, ranks_per_node: int | None) -> dict[str, Any]:
    """What a rank of the group tells the others. What is wrong is told, too, so that nobody waits."""
    place: dict[str, Any] = {"host": host(), "asked": ranks_per_node, "node": None, "local": None}
    try:
        if ranks_per_node is not None:
            place["asked"] = _limits.number("ranks_per_node", ranks_per_node, 1)
        place["local"] = local = _variable("LOCAL_WORLD_SIZE", 1)
        if local is not None:
            world, launched = _variable("WORLD_SIZE", 1), _variable("RANK", 0)
            if world is not None and world % local:
                raise errors.InvalidArgument(f"LOCAL_WORLD_SIZE is {local}, allowed: a divisor of WORLD_SIZE, {world}")
            place["node"] = (rank if launched is None else launched) // local
    except errors.InvalidArgument as error:
        place["error"] = str(error)
    return place


def agreed(everybody: list[dict[str, Any]]) -> int:
    """Ranks of each node, from what all ``[ranks]`` told: as they were asked to be, else by ``LOCAL_WORLD_SIZE``, else those of a host.

    Raises:
        errors.InvalidArgument: numbers that are none, that differ between ranks, or that contradict the hosts; on all ranks.
    """
    for rank, place in enumerate(everybody):
        if "error" in place:
            raise errors.InvalidArgument(f"{place['error']} (rank {rank})")
    ranks, first = len(everybody), everybody[0]
    for name, key in (("ranks_per_node", "asked"), ("LOCAL_WORLD_SIZE", "local")):
        for rank, place in enumerate(everybody):
            if place[key] != first[key]:
                raise errors.InvalidArgument(
                    f"{name} is {place[key]} on rank {rank}, allowed: {first[key]}, as on rank 0"
                )
    if first["asked"] is not None:
        size, name = first["asked"], "ranks_per_node"
        if ranks % size:
            raise errors.InvalidArgument(f"{name} is {size}, allowed: a divisor of {ranks}, the ranks of the group")
        nodes = [rank // size for rank in range(ranks)]
    elif first["local"] is not None:
        size, name = first["local"], "LOCAL_WORLD_SIZE"
        nodes = [place["node"] for place in everybody]
    else:
        return _in_blocks([place["host"] for place in everybody])
    hosts: dict[int, int] = {}
    for rank, node in enumerate(nodes):
        other = hosts.setdefault(node, rank)
        if everybody[rank]["host"] != everybody[other]["host"]:
            raise errors.InvalidArgument(
                f"{name} is {size}, allowed: the ranks of a host: rank {rank} runs on another one than rank {other}"
            )
    return _in_blocks(nodes)


def _in_blocks(nodes: list[Any]) -> int:
    """Ranks of each node, where ``nodes`` ``[ranks]`` names each rank's."""
    sizes: list[int] = []
    for rank, node in enumerate(nodes):
        if rank == 0 or nodes[rank - 1] != node:
            sizes.append(0)
        sizes[-1] += 1
    if len(set(sizes)) > 1 or len(sizes) > len(set(nodes)):
        raise errors.InvalidArgument(
            f"ranks of the nodes are {', '.join(map(str, sizes))}, allowed: the same number on every node, node after node"
        )
    return sizes[0]


def meeting_host(everybody: list[dict[str, Any]], gather: Callable[[str, str | None], list[str | None]]) -> str | None:
    """The address of rank 0's host by which the others reach it, on rank 0; None where all are on that host. All ranks call it."""
    elsewhere = next((rank for rank, place in enumerate(everybody) if place["host"] != everybody[0]["host"]), None)
    if elsewhere is None:
        return None
    addresses = gather(
        "by which address they are reached", _address_towards(os.environ.get("MASTER_ADDR") or SOMEWHERE)
    )
    return _address_towards(addresses[elsewhere] or SOMEWHERE) or addresses[0]


def host() -> str:
    """Names the running system."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _variable(name: str, least: int) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= _limits.MOST:
        raise errors.InvalidArgument(f"{name} is {text!r}, allowed: a whole number, {least} or more")
    return int(text)


def _address_towards(name: str) -> str | None:
    """The own address from which packets to ``name`` would leave. Nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as one:
            one.connect(address)
            return str(one.getsockname()[0])
    except OSError:
        return None
