"""Kernels that come with a wheel, where no GPU is needed to look at them: `ci/wheel/build` has looked whether they are the right ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from moexpress import _libraries, _native


def test_the_folder_of_the_wheel_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named: list[Path] = []
    monkeypatch.setattr(_native, "kernels_come_from", named.append)
    monkeypatch.setattr(_libraries, "KERNELS", tmp_path)
    _libraries.load_kernels()
    assert named == [tmp_path]


def test_a_wheel_without_kernels_compiles_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_native, "kernels_come_from", lambda folder: pytest.fail("there is none"))
    monkeypatch.setattr(_libraries, "KERNELS", tmp_path / "none")
    _libraries.load_kernels()


ARCHITECTURES = ["sm_80", "sm_90a", "sm_100a"]
shipped = pytest.mark.skipif(not _libraries.KERNELS.is_dir(), reason="this wheel has no kernels")


@shipped
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_gpu_looks_for_is_what_the_wheel_has(architecture: str) -> None:
    assert _native.kernels_absent(_libraries.KERNELS, architecture) == []
    others = [each for each in ARCHITECTURES if each != architecture]
    assert all(len(_native.kernels_absent(_libraries.KERNELS, other + "x")) > 10 for other in others)


@shipped
def test_a_damaged_kernel_is_not_taken(tmp_path: Path) -> None:
    for path in _libraries.KERNELS.glob("*-sm_90a-*.cubin"):
        shutil.copy(path, tmp_path)
    assert _native.kernels_absent(tmp_path, "sm_90a") == []
    damaged = next(tmp_path.glob("ep_counts_kernel*"))
    bytes = bytearray(damaged.read_bytes())
    bytes[len(bytes) // 2] ^= 1
    damaged.write_bytes(bytes)
    assert _native.kernels_absent(tmp_path, "sm_90a") == ["throughput/counts.cu"]
