"""Validation rules of option values, and how rendered template text is parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class _Auto:
    """A default that depends on another option; replaced when the options are built."""

    def __repr__(self) -> str:
        return "AUTO"


AUTO: Any = _Auto()


@dataclass(frozen=True, slots=True)
class Rule:
    """A validation rule.

    :param text: The rule as a phrase that follows "expected".
    :param holds: Returns whether a value satisfies it.
    :param read: Parses rendered template text into a value; ``None`` where text needs no parsing.
    """

    text: str
    holds: Callable[[Any], bool]
    read: Callable[[str], Any] | None = None

    def admits(self, value: Any) -> bool:
        """Returns whether a value of any type satisfies it."""
        try:
            return bool(self.holds(value))
        except TypeError:  # the check itself is undefined, such as for an unhashable value
            return False

    def or_none(self) -> Rule:
        """Returns the same rule, with ``None`` allowed."""
        holds, read = self.holds, self.read
        return Rule(
            f"{self.text} or None",
            lambda value: value is None or holds(value),
            None if read is None else lambda text: None if text == "None" else read(text),
        )


def is_int(value: object) -> bool:
    """Returns whether it is an integer, and not a boolean."""
    return type(value) is int


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _read_bool(text: str) -> object:
    return {"true": True, "false": False}.get(text.lower(), text)


def one_of(*values: str) -> Rule:
    """Returns the rule "one of these words"."""
    return Rule(f"one of {sorted(values)}", lambda value: value in values)


def at_least(low: int) -> Rule:
    """Returns the rule "an integer of at least ``low``"."""
    return Rule(f"an integer of at least {low}", lambda v: is_int(v) and v >= low, int)


def between(low: int, high: int) -> Rule:
    """Returns the rule "an integer from ``low`` to ``high``"."""
    return Rule(f"an integer from {low} to {high}", lambda v: is_int(v) and low <= v <= high, int)


def matching(pattern: str, text: str) -> Rule:
    """Returns a rule for text that matches a pattern completely; ``text`` describes it."""
    compiled = re.compile(pattern)
    return Rule(text, lambda v: isinstance(v, str) and compiled.fullmatch(v) is not None)


POSITIVE = Rule("a positive integer", lambda v: is_int(v) and v > 0, int)
SECONDS = Rule(
    "a number of seconds greater than 0", lambda v: _is_number(v) and 0 < v < 1e10, float
)
SECONDS_OR_ZERO = Rule(
    "a number of seconds of at least 0", lambda v: _is_number(v) and 0 <= v < 1e10, float
)
FRACTION = Rule("a number from 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1, float)
BOOL = Rule("True or False", lambda v: type(v) is bool, _read_bool)
TEXT = Rule("a non-empty string", lambda v: isinstance(v, str) and v != "")
CONN_ID = Rule(
    "the id of an Airflow connection, not an address",
    lambda v: isinstance(v, str) and v != "" and "://" not in v and "@" not in v,
)
FUNCTION = Rule("a function of one argument", lambda v: callable(v) and takes(v, 1))


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


JSON = Rule("a JSON value", _is_json)


def takes(function: Callable[..., Any], count: int) -> bool:
    """Returns whether a function can be called with ``count`` arguments."""
    import inspect

    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True
