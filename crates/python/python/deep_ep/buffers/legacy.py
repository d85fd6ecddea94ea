"""V1's buffer."""

from __future__ import annotations

from ..buffer import Buffer

__all__ = ["Buffer"]
