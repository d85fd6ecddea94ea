"""The reference that is made of docstrings has something to say of every public name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType

import deep_ep
import moexpress


def modules() -> Iterator[ModuleType]:
    """The public modules of both packages."""
    for package in (moexpress, deep_ep):
        yield package
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not any(part.startswith("_") for part in found.name.split(".")):
                yield importlib.import_module(found.name)


def names(module: ModuleType) -> Iterator[tuple[str, object]]:
    """What a module gives out: what it lists, or else what it defines."""
    listed = getattr(module, "__all__", None)
    for name in listed or vars(module):
        value = getattr(module, name)
        if listed or (not name.startswith("_") and getattr(value, "__module__", None) == module.__name__):
            yield name, value


def undocumented() -> Iterator[str]:
    for module in modules():
        if not module.__doc__:
            yield module.__name__
        for name, value in names(module):
            # Data has its docstring behind it, where nobody finds it at run time; an alias of another's function is data.
            if not callable(value) or getattr(value, "__module__", None) not in ours():
                continue
            if not inspect.getdoc(value) or (inspect.isclass(value) and "__doc__" not in vars(value)):
                yield f"{module.__name__}.{name}"
            if inspect.isclass(value):
                for member, what in inspect.getmembers(value):
                    if not member.startswith("_") and (callable(what) or isinstance(what, property)):
                        own = any(member in vars(base) and base.__module__ in ours() for base in value.__mro__)
                        if own and not inspect.getdoc(what):
                            yield f"{module.__name__}.{name}.{member}"


def ours() -> set[str]:
    """Names of all modules of the packages that are loaded."""
    return {name for name in sys.modules if name.split(".")[0] in ("moexpress", "deep_ep", "deep_ep_cpp")}


def test_every_public_name_has_a_docstring() -> None:
    assert sum(1 for module in modules() for _ in names(module)) > 30
    assert list(undocumented()) == []
