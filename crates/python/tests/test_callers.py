"""The scripts that run frameworks' code against deep_ep: that what they leave out is not left out in silence."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from callers import layer, sources, stand_ins


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


def test_every_framework_has_modules_and_cases() -> None:
    for name in sources.FRAMEWORKS:
        cases = [case.name for case in importlib.import_module(f"callers.{name}").cases()]
        assert cases and len(cases) == len(set(cases)), name
        package = sources.PACKAGES.get(name, name)
        assert {module.partition(".")[0] for module in sources.modules(name)} == {package}


def test_checkouts_of_v2_have_the_frameworks_packages(tmp_path: Path) -> None:
    for folder in ("vllm_v2/vllm", "sglang_v2/python/sglang", "torchtitan/torchtitan"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "vllm_v2" / "COMMIT").write_text("1.2.3\n")
    found = sources.parse([f"all={tmp_path}"])
    assert {name: (source.path.name, source.commit) for name, source in found.items()} == {
        "vllm_v2": ("vllm_v2", "1.2.3"),
        "sglang_v2": ("python", "unknown"),
        "torchtitan": ("torchtitan", "unknown"),
    }


@pytest.mark.parametrize("name", ["vllm_v2", "sglang_v2"])
def test_a_checkout_without_v2_is_told_so(name: str, tmp_path: Path) -> None:
    here = SimpleNamespace(source=tmp_path, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"v2 is not in this checkout: take one with V2, such as"):
        importlib.import_module(f"callers.{name}").load(here)


@pytest.mark.parametrize("block", [32, 128])
def test_codes_and_scales_of_all_forms_are_the_same_rows(block: int) -> None:
    x = torch.randn(5, 1024, generator=torch.Generator().manual_seed(1))
    codes, scales = layer.fp8(x, power_of_two=True, block=block)
    rows = layer.from_fp8(codes, scales)
    assert (rows - x).abs().max() < 0.1 * x.abs().max()
    packed = layer.ue8m0(scales).view(torch.int32)
    by_columns = packed.t().contiguous().t()
    for form in (layer.ue8m0(scales), packed, by_columns):
        assert torch.equal(layer.from_fp8(codes, form), rows)
    # One column is contiguous with any strides.
    single, part = packed[:, :1].t().contiguous().t(), 4 * block
    assert single.stride() == (1, 5)
    assert torch.equal(layer.from_fp8(codes[:, :part], single), rows[:, :part])
