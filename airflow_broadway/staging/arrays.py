"""Arrow arrays from Python lists, and Arrow's functions on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute

__all__ = ["array_of", "compute"]

#: Arrow's functions; most are made when the module is loaded, and unknown to type checkers.
compute: Any = pyarrow.compute


def array_of(values: Sequence[Any], kind: pa.DataType) -> Any:
    """Return the values as one array of that type."""
    return pa.array(values, type=kind)
