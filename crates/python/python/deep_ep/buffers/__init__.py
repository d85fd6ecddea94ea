"""The buffers, where DeepEP V2 has them: ``elastic`` for V2's own, ``legacy`` for V1's."""

from __future__ import annotations

__all__: list[str] = []
