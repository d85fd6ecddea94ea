"""Imports a few modules of a framework's checkout without the rest of it.

Of a framework only the modules that talk to ``deep_ep`` are imported as they are. Whatever else they import is a stand-in: a module whose
names can be imported, subclassed and written in annotations. What a module calls must be *given* by the script that drives it: calling
or reading anything else of a stand-in raises, so nothing is silently left out.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class _Missing(type):
    """The type of what a stand-in has, but nobody gave."""

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        if cls.__dict__.get("_stands_in"):
            raise RuntimeError(f"{cls.__name__} of a stand-in was called: the script that drives this has to give it")
        return super().__call__(*arguments, **named)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{cls.__name__}.{name}")

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __bool__(cls) -> bool:
        raise RuntimeError(f"{cls.__name__} of a stand-in was read: the script that drives this has to give it")


def _missing(name: str) -> type:
    return _Missing(name, (), {"_stands_in": True})


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # ``from package import module`` asks the package first: modules that are imported as they are go before.
        module = f"{self.__name__}.{name}"
        if self.__dict__["_finder"].knows(module):
            return importlib.import_module(module)
        return _missing(module)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(
        self, root: Path, packages: Sequence[str], imported: Sequence[str], given: Mapping[str, dict[str, Any]]
    ) -> None:
        self.root, self.packages, self.imported, self.given = root, set(packages), set(imported), given

    def knows(self, module: str) -> bool:
        return any(name == module or name.startswith(f"{module}.") for name in (*self.imported, *self.given))

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        if fullname in self.imported:
            return importlib.util.spec_from_file_location(fullname, file_of(self.root, fullname))
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.__dict__["_finder"] = self
        module.__dict__.update(self.given.get(spec.name, {}))
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def file_of(root: Path, module: str) -> Path:
    """The file of a module beneath the folder that holds its package."""
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def provide(
    root: Path, packages: Sequence[str], imported: Sequence[str], given: Mapping[str, dict[str, Any]] | None = None
) -> None:
    """From now on, imports of ``packages`` find the modules ``imported`` in ``root`` and stand-ins for all others.

    Args:
        root: the folder that holds the framework's package.
        packages: top-level packages, the framework's and others; one that is installed and not the framework's is left alone.
        imported: modules that are imported as they are.
        given: for a stand-in's full name, what it has.
    """
    packages = [name for name in packages if (root / name).is_dir() or importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _Finder(root, packages, imported, given or {}))


def decorator(*arguments: Any, **named: Any) -> Any:
    """Stands in for a decorator, with or without arguments: leaves the function as it is."""
    if len(arguments) == 1 and callable(arguments[0]) and not named:
        return arguments[0]
    return lambda function: function


class Silent:
    """Stands in for a logger: takes any message."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **named: None
