"""The release of this package, importable from every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__version__ = "0.1.0"


def known_fields(kind: type[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON object's entries that are fields of a dataclass.

    A newer release may add fields without a new format version: this release ignores them.
    """
    return {item.name: value[item.name] for item in dataclasses.fields(kind) if item.name in value}
