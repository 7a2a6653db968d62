"""The release of this package, where every room may read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__version__ = "0.1.0"


def known_fields(kind: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a JSON object that a dataclass has.

    A newer release may add fields to a format without another version: this one ignores them.
    """
    return {each.name: value[each.name] for each in dataclasses.fields(kind) if each.name in value}
