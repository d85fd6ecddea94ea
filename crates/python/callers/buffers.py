"""Looks at the calls of ``deep_ep.Buffer`` that a framework makes, and plants faults in them."""

from __future__ import annotations

from typing import Any

import deep_ep
import torch

PLANTS = ("dispatch", "combine", "backward")
"""Where a fault can be planted: in all calls of a kind, or in both kinds where they bring gradients back."""


def watch(told: list[str]) -> None:
    """Notes the arguments with which buffers are made."""
    made = deep_ep.Buffer.__init__

    def init(self: Any, group: Any, *arguments: Any, **named: Any) -> None:
        names = ("num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank")
        given = {**dict(zip(names, arguments, strict=False)), **named}
        told.append(", ".join(f"{name}={value}" for name, value in given.items() if name != "group"))
        made(self, group, *arguments, **named)

    setattr(deep_ep.Buffer, "__init__", init)  # noqa: B010


def plant(what: str) -> None:
    """Halves the first row that calls are given: every case must fail then, or with ``backward`` every one that trains."""

    def spoilt(x: Any) -> Any:
        if isinstance(x, tuple):
            return (spoilt(x[0]), x[1])
        x = x.clone()
        x[..., :1, :] = (x[..., :1, :].float() * 0.5).to(x.dtype)
        return x

    def wrap(name: str) -> None:
        call = getattr(deep_ep.Buffer, name)

        def faulty(self: Any, *arguments: Any, **named: Any) -> Any:
            if what == "backward" and torch._C._current_graph_task_id() == -1:
                pass
            elif "x" in named:
                named["x"] = spoilt(named["x"])
            else:
                arguments = (spoilt(arguments[0]), *arguments[1:])
            return call(self, *arguments, **named)

        setattr(deep_ep.Buffer, name, faulty)

    for kind in ("dispatch", "combine") if what == "backward" else (what,):
        wrap(kind)
        wrap(f"low_latency_{kind}")
