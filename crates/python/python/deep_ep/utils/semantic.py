"""Small helpers that DeepEP's callers import."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def value_or(value: T | None, default: T) -> T:
    """``value``, or ``default`` where it is None."""
    return default if value is None else value
