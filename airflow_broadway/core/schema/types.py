"""The column types a schema can name, as plain frozen values.

Each type renders itself as Spark DDL (:attr:`ddl`), and reading that text gives the type back.
Rules that Spark would enforce only once the job runs (one name per column whatever its case, the
bounds of a decimal, the keys of a map) are enforced here, when the value is built.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Union

from airflow_broadway.core.errors import SchemaError

#: Most digits a decimal may have; the limit is Spark's.
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
    #: An instant: microseconds, kept in UTC.
    TIMESTAMP = "timestamp"
    #: A reading of a calendar and a clock, with no zone: microseconds.
    TIMESTAMP_NTZ = "timestamp_ntz"

    @property
    def ddl(self) -> str:
        """The type as Spark DDL."""
        return self.value


@dataclass(frozen=True, slots=True)
class Decimal:
    """An exact number.

    :param precision: Digits in all, 1 to 38.
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
    """A list; its elements may be null, as everywhere in Spark DDL."""

    element: DataType

    @property
    def ddl(self) -> str:
        """The type as Spark DDL."""
        return f"array<{self.element.ddl}>"


@dataclass(frozen=True, slots=True)
class Map:
    """A dictionary; its values may be null, its keys not.

    :raises SchemaError: If the key is an array, map or struct: neither JSON nor a Python
        dictionary has such keys.
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

    :raises SchemaError: If there is no field, or two have one name whatever its case.
    """

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        check_fields(self.fields)

    @property
    def ddl(self) -> str:
        """The type as Spark DDL."""
        return f"struct<{', '.join(field.render(': ') for field in self.fields)}>"


@dataclass(frozen=True, slots=True)
class Field:
    """A column, or a field of a struct.

    :param comment: For people; kept in the DDL, and without effect on data.
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
        """Return the field as Spark DDL, with ``separator`` between its name and its type."""
        text = f"{quote_name(self.name)}{separator}{self.type.ddl}"
        if not self.nullable:
            text += " not null"
        if self.comment is not None:
            text += f" comment '{''.join(_ESCAPES.get(c, c) for c in self.comment)}'"
        return text


# Evaluated at run time, where Python 3.10 knows no `|` between a class and a forward reference.
DataType = Union[Atomic, Decimal, Array, Map, Struct]  # noqa: UP007


def check_fields(fields: tuple[Field, ...]) -> None:
    """Refuse an empty list of fields, and two whose names differ at most in case."""
    if not fields:
        raise SchemaError("at least one column is needed")
    seen: dict[str, str] = {}
    for field in fields:
        check_name(field.name, seen)


def check_name(name: str, seen: dict[str, str]) -> None:
    """Refuse ``name`` if ``seen`` has it in any case, as Spark would; else add it there."""
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
    """Return a column's name as DDL wants it: in backquotes unless it is a plain word."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    return "`" + name.replace("`", "``") + "`"
