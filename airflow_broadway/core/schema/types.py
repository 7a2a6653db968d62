"""The column types of a schema, as frozen values.

Each type renders itself as Spark DDL (:attr:`ddl`), and parsing that text returns the type.  Rules
that Spark would enforce only when the job runs (unique column names ignoring case, the bounds of a
decimal, the keys of a map) are enforced here, on construction.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Union

from airflow_broadway.core.errors import SchemaError

#: The maximum precision of a decimal; the limit is Spark's.
MAX_PRECISION = 38

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class Atomic(enum.Enum):
    """A type without parameters; the value is its DDL."""

    BOOLEAN = "boolean"
    TINYINT = "tinyint"
    SMALLINT = "smallint"
    INT = "int"
    BIGINT = "bigint"
    FLOAT = "float"
    DOUBLE = "double"
    STRING = "string"
    BINARY = "binary"
    DATE = "date"
    #: A timestamp with time zone: microseconds, stored in UTC.
    TIMESTAMP = "timestamp"
    #: A timestamp without time zone: microseconds.
    TIMESTAMP_NTZ = "timestamp_ntz"

    @property
    def ddl(self) -> str:
        """The type as Spark DDL."""
        return self.value


@dataclass(frozen=True, slots=True)
class Decimal:
    """An exact number.

    :param precision: The total number of digits, 1 to 38.
    :param scale: Digits after the point, 0 to ``precision``.
    :raises SchemaError: If either is out of range.
    """

    precision: int = 10
    scale: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.precision <= MAX_PRECISION:
            raise SchemaError(
                f"a decimal's precision is from 1 to {MAX_PRECISION}, not {self.precision}"
            )
        if not 0 <= self.scale <= self.precision:
            raise SchemaError(
                f"a decimal's scale is from 0 to its precision {self.precision}, not {self.scale}"
            )

    @property
    def ddl(self) -> str:
        """The type as Spark DDL."""
        return f"decimal({self.precision},{self.scale})"


@dataclass(frozen=True, slots=True)
class Array:
    """A list; its elements are nullable, as everywhere in Spark DDL."""

    element: DataType

    @property
    def ddl(self) -> str:
        """The type as Spark DDL."""
        return f"array<{self.element.ddl}>"


@dataclass(frozen=True, slots=True)
class Map:
    """A dictionary; its values are nullable, its keys are not.

    :raises SchemaError: If the key is an array, map or struct: neither JSON nor a Python
        dictionary supports such keys.
    """

    key: DataType
    value: DataType

    def __post_init__(self) -> None:
        if not isinstance(self.key, (Atomic, Decimal)):
            raise SchemaError(f"a map's key is a simple type, not {self.key.ddl}")

    @property
    def ddl(self) -> str:
        """The type as Spark DDL."""
        return f"map<{self.key.ddl}, {self.value.ddl}>"


@dataclass(frozen=True, slots=True)
class Struct:
    """Named fields, in order.

    :raises SchemaError: If there is no field, or two names are equal ignoring case.
    """

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        if not self.fields:
            raise SchemaError("at least one column is needed")
        seen: dict[str, str] = {}
        for field in self.fields:
            check_name(field.name, seen)

    @property
    def ddl(self) -> str:
        """The type as Spark DDL."""
        return f"struct<{', '.join(field.render(': ') for field in self.fields)}>"


@dataclass(frozen=True, slots=True)
class Field:
    """A column, or a field of a struct.

    :param comment: A description; kept in the DDL, and without effect on data.
    :raises SchemaError: If the name is empty, or not encodable as UTF-8.
    """

    name: str
    type: DataType
    nullable: bool = True
    comment: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise SchemaError("a column needs a name")
        for text in (self.name, self.comment or ""):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise SchemaError(f"{text!r} cannot be encoded as UTF-8") from None

    def render(self, separator: str) -> str:
        """Returns the field as Spark DDL, with ``separator`` between its name and its type."""
        text = f"{quote_name(self.name)}{separator}{self.type.ddl}"
        if not self.nullable:
            text += " not null"
        if self.comment is not None:
            text += f" comment '{''.join(_ESCAPES.get(c, c) for c in self.comment)}'"
        return text


# Evaluated at run time: Python 3.10 has no `|` between a class and a forward reference.
DataType = Union[Atomic, Decimal, Array, Map, Struct]  # noqa: UP007


def check_name(name: str, seen: dict[str, str]) -> None:
    """Refuses ``name`` if it is in ``seen`` ignoring case, as Spark would; else adds it."""
    first = seen.setdefault(key := name.lower(), "")
    if first == name:
        raise SchemaError(f"two columns are named {quote_name(name)}")
    if first:
        raise SchemaError(
            f"columns {quote_name(first)} and {quote_name(name)} differ only in case, "
            "which Spark ignores"
        )
    seen[key] = name


def quote_name(name: str) -> str:
    """Returns a column's name for DDL: in backquotes unless it is a plain word."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    return "`" + name.replace("`", "``") + "`"
