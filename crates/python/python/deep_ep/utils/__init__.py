"""Events, and the helpers that DeepEP's tests use."""

from __future__ import annotations

from .envs import check_nvlink_connections
from .event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]
