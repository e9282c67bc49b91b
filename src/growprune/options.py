"""Options: fields of a dataclass, each with a default, one line of help, and a check.

Nothing of torch is imported, nor of the command line, which `console` makes from these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from growprune.errors import GrowpruneError, nearest


def option(default: Any, text: str, part: str | None = None, **more: Any) -> Any:
    """A field that is an option: its default, one line of help, the part of the help it stands in.

    More: bounds (`min`, `above`, `max`, `below`), what a value is called in the help (`metavar`), whether the text may
    be `empty`, the other types that a TOML file may hold it as (`also`), and a function that refuses it (`check`).
    """
    return field(default=default, metadata={"help": text, "part": part, **more})


class Options:
    """Options that check themselves."""

    def __post_init__(self) -> None:
        for name, (kind, bounds) in known(type(self)).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), kind, bounds))


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


Known = Mapping[str, tuple[Any, Mapping[str, Any]]]


_known: dict[type[Any], Known] = {}


def known(kind: type[Any]) -> Known:
    """The options of a kind: the type and what else there is to know of each."""
    if kind not in _known:
        hints = get_type_hints(kind)
        _known[kind] = {each.name: (hints[each.name], each.metadata) for each in fields(kind)}
    return _known[kind]


def checked(name: str, value: Any, kind: Any, bounds: Mapping[str, Any]) -> Any:
    """One option's value, if it is of its type, among its choices, within its bounds."""
    options = get_args(kind)
    if type(None) in options:
        if value is None:
            return None
        kind = options[0]
    if get_origin(kind) is Literal:
        if value not in (choices := get_args(kind)):
            raise GrowpruneError(f"{flag(name)}: '{value}' is not {listed(choices)}{nearest(str(value), choices)}")
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and number:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if kind is float:
        fits = number and math.isfinite(value)
    else:
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        raise GrowpruneError(f"{flag(name)}: needs {WORDS[kind]}, not {value!r}")
    for word, wrong, said in BOUNDS:
        if word in bounds and wrong(value, bounds[word]):
            raise GrowpruneError(f"{flag(name)}: {value} must be {said.format(bounds[word])}")
    if kind is str and not value.strip() and not bounds.get("empty"):
        raise GrowpruneError(f"{flag(name)}: is empty")
    if kind is str and any(sign in value for sign in "\0\r\n"):
        raise GrowpruneError(f"{flag(name)}: {value!r} is more than one line")
    if "check" in bounds:
        bounds["check"](value)
    return value


WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
BOUNDS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("min", lambda value, bound: value < bound, "{} or more"),
    ("above", lambda value, bound: value <= bound, "above {}"),
    ("max", lambda value, bound: value > bound, "{} or less"),
    ("below", lambda value, bound: value >= bound, "below {}"),
)


def listed(names: Iterable[str]) -> str:
    """
    >>> listed(["l1", "l2", "obd"]), listed(["l1"])
    ('l1, l2 or obd', 'l1')
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
