"""Checkouts of frameworks, and what of them is needed."""

from __future__ import annotations

import importlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

FRAMEWORKS = ("megatron", "vllm", "vllm_v2", "sglang", "sglang_v2", "torchtitan", "torchtitan_v2", "xtuner")
PACKAGES = {"vllm_v2": "vllm", "sglang_v2": "sglang", "torchtitan_v2": "torchtitan"}
"""Where a framework's package has another name than its checkout here."""


@dataclass
class Source:
    """A framework's checkout."""

    path: Path
    """The folder that holds its package."""
    commit: str


def parse(given: list[str]) -> dict[str, Source]:
    """From ``NAME=PATH``; ``all=PATH`` names a folder with a checkout for each name."""
    found: dict[str, Source] = {}
    for one in given:
        name, _, path = one.partition("=")
        if name == "all":
            there = {name: Path(path) / name for name in FRAMEWORKS if (Path(path) / name).is_dir()}
            if not there:
                raise ValueError(f"no checkout in {path!r}, allowed: a folder with some of {', '.join(FRAMEWORKS)}")
            found |= {name: _source(name, path) for name, path in there.items()}
        elif name in FRAMEWORKS and path:
            found[name] = _source(name, Path(path))
        else:
            raise ValueError(f"--source is {one!r}, allowed: NAME=PATH with a name of {', '.join(FRAMEWORKS)}, or all")
    return found


def _source(name: str, path: Path) -> Source:
    package = PACKAGES.get(name, name)
    # SGLang's package lies in a folder of its checkout.
    inner = path / "python" if (path / "python" / package).is_dir() else path
    if not (inner / package).is_dir():
        raise ValueError(f"no package {package} in {str(path)!r}, allowed: a checkout of it")
    return Source(inner.resolve(), _commit(path))


def _commit(path: Path) -> str:
    """What a checkout is of: git's commit, or what a file COMMIT says."""
    told = path / "COMMIT"
    if told.is_file():
        return told.read_text().strip()
    if (path / ".git").exists():
        return subprocess.run(
            ["git", "-C", str(path), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    return "unknown"


def modules(name: str) -> list[str]:
    """Modules of a framework that are imported as they are."""
    imported: list[str] = importlib.import_module(f"callers.{name}").IMPORTED
    return imported
