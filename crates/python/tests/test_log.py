"""What the native half says beside its results: on standard error, as much as ``RUST_LOG`` says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STRANGER = """
import socket
from moexpress import _native, errors

place = _native.Place()
host, port = place.address.rsplit(":", 1)
stranger = socket.create_connection((host, int(port)))
stranger.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
try:
    _native.Meeting(0, 2, place.address, place.secret, 3.0, place)
except errors.MeetingFailed:
    print("nobody came")
"""


@pytest.mark.parametrize(("level", "is_told"), [(None, True), ("off", False)], ids=["by default", "RUST_LOG=off"])
def test_a_connection_that_is_turned_away_is_told_of(level: str | None, is_told: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RUST_LOG"}
    environment |= {} if level is None else {"RUST_LOG": level}
    script = [sys.executable, "-c", STRANGER]
    ended = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "nobody came\n"), ended.stderr
    assert ("a connection is turned away" in ended.stderr) == is_told, ended.stderr
