"""The scripts that run frameworks' code against deep_ep: that what they leave out is not left out in silence."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from callers import sources, stand_ins


@pytest.fixture
def framework(tmp_path: Path) -> Iterator[Path]:
    """A package of which one module is imported, and what that needs is not."""
    inner = tmp_path / "madeup" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "madeup" / "__init__.py").write_text("raise RuntimeError('the package itself is never run')")
    (inner / "other.py").write_text("VALUE = 7")
    (inner / "real.py").write_text(
        "from madeup.kernels import fused, given\n"
        "from madeup.kernels import Base\n"
        "from madeup.inner import other\n"
        "class Derived(Base): ...\n"
        "def call(x: Base | None = None): return fused(1)\n"
        "def read(): return 1 if fused.flag else 0\n"
    )
    stand_ins.provide(
        tmp_path, ["madeup"], ["madeup.inner.real", "madeup.inner.other"], {"madeup.kernels": {"given": 5}}
    )
    yield tmp_path
    sys.meta_path.pop(0)
    for name in [name for name in sys.modules if name.partition(".")[0] == "madeup"]:
        del sys.modules[name]


def test_a_stand_in_raises_when_it_is_called_or_read_and_nobody_gave_it(framework: Path) -> None:
    real = importlib.import_module("madeup.inner.real")
    assert (real.given, real.other.VALUE) == (5, 7)
    real.Derived()
    with pytest.raises(RuntimeError, match=r"madeup\.kernels\.fused of a stand-in was called"):
        real.call()
    with pytest.raises(RuntimeError, match=r"madeup\.kernels\.fused\.flag of a stand-in was read"):
        real.read()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("unheardof=/tmp", "--source is 'unheardof=/tmp', allowed: NAME=PATH"),
        ("vllm", "--source is 'vllm', allowed"),
        ("all=/nowhere", "no checkout in '/nowhere', allowed"),
        ("vllm=/nowhere", "no package vllm in '/nowhere', allowed"),
    ],
)
def test_a_checkout_that_is_none_is_refused(given: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        sources.parse([given])
