"""NVIDIA's compiler, which comes with torch as a package of its own and so lies where the system does not look."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

NVRTC = "libnvrtc.so.13"


def load_nvrtc() -> None:
    """Loads it from where pip put it, unless the system finds it. Where it is not to be had, making a communicator says so."""
    places = [NVRTC, *(str(path) for folder in sys.path for path in Path(folder).glob(f"nvidia/*/lib/{NVRTC}"))]
    for place in places:
        try:
            ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return
