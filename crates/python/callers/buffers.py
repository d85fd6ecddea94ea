"""Looks at the calls of ``deep_ep``'s buffers that a framework makes, and plants faults in them."""

from __future__ import annotations

from typing import Any

import deep_ep
import torch

PLANTS = ("dispatch", "combine", "backward")
"""Where a fault can be planted: in all calls of a kind, or in both kinds where they bring gradients back."""


def watch(told: list[str]) -> None:
    """Notes the arguments with which buffers are made."""
    first = {
        deep_ep.Buffer: ("num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank"),
        deep_ep.ElasticBuffer: ("num_bytes",),
    }

    def noted(kind: type, names: tuple[str, ...]) -> None:
        made = getattr(kind, "__init__")  # noqa: B009

        def init(self: Any, group: Any, *arguments: Any, **named: Any) -> None:
            given = {**dict(zip(names, arguments, strict=False)), **named}
            told.append(", ".join(f"{name}={value}" for name, value in given.items() if name != "group"))
            made(self, group, *arguments, **named)

        setattr(kind, "__init__", init)  # noqa: B010

    for kind, names in first.items():
        noted(kind, names)


def plant(what: str) -> None:
    """Halves the first row that calls are given: every case must fail then, or with ``backward`` every one that trains."""

    def spoilt(x: Any) -> Any:
        if isinstance(x, tuple):
            return (spoilt(x[0]), x[1])
        x = x.clone()
        x[..., :1, :] = (x[..., :1, :].float() * 0.5).to(x.dtype)
        return x

    def wrap(kind: type, name: str) -> None:
        call = getattr(kind, name)

        def faulty(self: Any, *arguments: Any, **named: Any) -> Any:
            if what == "backward" and torch._C._current_graph_task_id() == -1:
                pass
            elif "x" in named:
                named["x"] = spoilt(named["x"])
            else:
                arguments = (spoilt(arguments[0]), *arguments[1:])
            return call(self, *arguments, **named)

        setattr(kind, name, faulty)

    for name in ("dispatch", "combine") if what == "backward" else (what,):
        wrap(deep_ep.Buffer, name)
        wrap(deep_ep.Buffer, f"low_latency_{name}")
        wrap(deep_ep.ElasticBuffer, name)
