"""What kernels need: those that came with the wheel, and for other GPUs NVIDIA's compiler.

The compiler comes with torch as a package of its own, and so lies where the system does not look.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from . import _native

NVRTC = "libnvrtc.so.13"
KERNELS = Path(__file__).with_name("kernels")
"""Compiled kernels, in wheels that have some."""


def load_kernels() -> None:
    """Names the kernels that came with the wheel, and loads the compiler from where pip put it, unless the system finds it.

    Where neither serves a GPU, making a communicator says so.
    """
    if KERNELS.is_dir():
        _native.kernels_come_from(KERNELS)
    places = [NVRTC, *(str(path) for folder in sys.path for path in Path(folder).glob(f"nvidia/*/lib/{NVRTC}"))]
    for place in places:
        try:
            ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return
