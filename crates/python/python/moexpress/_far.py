"""What carries rows between nodes: by name, as an argument or the environment says."""

from __future__ import annotations

import os
from typing import Literal, cast, get_args

from . import _limits

Far = Literal["loop", "roce", "ibgda"]
"""``roce``: RDMA over Ethernet or InfiniBand. ``ibgda``: the same, posted by kernels of GPUs. ``loop``: copies between processes of one
host, for tests."""

FAR, DEVICES = "MOEXPRESS_FAR", "MOEXPRESS_FAR_DEVICES"
"""Variables that say which, and by which devices, where no argument does."""
DEFAULT: Far = "roce"


def chosen(far: Far | None, devices: str | None) -> tuple[Far, str | None]:
    """The transport and its devices."""
    name, value = ("far", far) if far is not None else (FAR, os.environ.get(FAR) or DEFAULT)
    if value not in get_args(Far):
        raise _limits.invalid(name, _limits.told(value), ", ".join(get_args(Far)))
    if devices is not None:
        _limits.name("far_devices", devices)
    return cast(Far, value), devices or os.environ.get(DEVICES) or None
