"""Arrow arrays from Python lists, and Arrow's functions on them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute

__all__ = ["array_of", "compute"]

#: Arrow's functions; most are made when the module is loaded, and unknown to type checkers.
compute: Any = pyarrow.compute


def array_of(values: list[Any], kind: pa.DataType) -> pa.Array[Any]:
    """Return the values as an array of that type.

    As :func:`pyarrow.array` would, except that this does not import pandas where it is installed
    (a second and a half of a task's time) only to learn that a list is no Series.
    """
    made: Any = pa.scalar(values, type=pa.list_(kind))
    array: pa.Array[Any] = made.values
    return array
