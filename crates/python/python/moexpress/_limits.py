"""What numbers, names and switches must be, said before anything moves. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from operator import index
from typing import Any

from . import errors

LONGEST = 1 << 128
"""Beyond this a number is told by its size: Python refuses to write numbers of thousands of digits."""

MOST = (1 << 32) - 1
"""The largest number of most kinds."""


def invalid(what: str, value: object, allowed: object) -> errors.InvalidArgument:
    """An error in the words of the rest."""
    return errors.InvalidArgument(f"{what} is {value}, allowed: {allowed}")


def told(value: object) -> str:
    """A value in an error: numbers, short names and None as they are, the rest by its type."""
    if isinstance(value, int) and not -LONGEST < value < LONGEST:
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, (int, float)) or (isinstance(value, str) and len(value) < 80):
        return str(value)
    return f"a {type(value).__name__}"


def number(name: str, value: Any, least: int = 0, most: int = MOST) -> int:
    """Checks a whole number; it, as Python has it."""
    if type(value) is int and least <= value <= most:
        return value
    try:
        whole = index(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises all of them
        raise invalid(name, told(value), f"a whole number, {least} to {most}") from None
    if not least <= whole <= most:
        raise invalid(name, told(whole), f"{least} to {most}")
    return whole


def some(name: str, value: Any, least: int = 0, most: int = MOST) -> int | None:
    """The same, or None."""
    return None if value is None else number(name, value, least, most)


def numbers(name: str, values: Collection[Any], longest: int, least: int = 0, most: int = MOST) -> list[int]:
    """Checks a list of at most ``longest`` whole numbers."""
    if not hasattr(values, "__len__") or isinstance(values, (str, bytes)):
        raise invalid(name, told(values), "a list of whole numbers")
    try:
        length = len(values)
        if length > longest:
            raise invalid(f"length of {name}", length, f"at most {longest}")
        given = list(values)
    except (TypeError, RuntimeError, OverflowError):  # a tensor without dimensions, a range beyond what len may be
        raise invalid(name, told(values), f"a list of at most {longest} whole numbers") from None
    return [number(name, value, least, most) for value in given]


def real(name: str, value: Any, *, unit: str = "", zero: bool = False) -> float:
    """Checks a number that need not be whole: more than 0, or with ``zero`` 0."""
    allowed = f"{unit}{'0 or more' if zero else 'more than 0'}"
    try:
        given = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise invalid(name, told(value), allowed) from None
    if isinstance(value, str) or not (given > 0 or (zero and given == 0)):
        raise invalid(name, told(value) if not math.isnan(given) else "not a number", allowed)
    return given


def seconds(name: str, value: Any) -> float:
    """Checks a time."""
    return real(name, value, unit="seconds, ")


def flag(name: str, value: Any) -> bool:
    """Checks a switch, which 0 and 1 are, too; it, as Python has it."""
    if value is True or value is False:
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):  # which is no whole number
        return bool(value)
    try:
        whole = index(value)
    except (TypeError, ValueError, RuntimeError):
        whole = -1
    if whole not in (0, 1):
        raise invalid(name, told(value), "True or False")
    return whole == 1


def name(what: str, value: Any) -> str:
    """Checks that a name is one; which are allowed says who knows them."""
    if not isinstance(value, str):
        raise invalid(what, told(value), "a name")
    return value
