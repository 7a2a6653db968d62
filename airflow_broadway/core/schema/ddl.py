"""Schemas: the data columns of a batcher, written as Spark DDL.

``Batcher(schema="origin string not null, dep_delay double")`` is parsed together with the Dag,
where neither Spark nor a session exists; hence our own parser::

    schema  = column ("," column)*
    column  = name [":"] type ["NOT NULL"] ["COMMENT" text]
    type    = simple | DECIMAL ["(" precision ["," scale] ")"]
            | ARRAY "<" type ">" | MAP "<" type "," type ">" | STRUCT "<" column ("," column)* ">"

Keywords are case-insensitive.  A name that is not a plain word of ASCII letters, digits and ``_``
is quoted with backquotes, with a backquote inside it doubled.  ``timestamp`` always has a time
zone, regardless of ``spark.sql.timestampType``.  Comments are kept and have no effect.

:meth:`Schema.converter` compiles the function that validates and converts one message's data.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from airflow_broadway.core.errors import SchemaError
from airflow_broadway.core.schema.records import Converter
from airflow_broadway.core.schema.types import (
    Array,
    Atomic,
    DataType,
    Decimal,
    Field,
    Map,
    Struct,
    check_name,
)

#: The maximum nesting of arrays, maps and structs.
MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Schema(Struct):
    """The columns of a batch's data, in order.

    :raises SchemaError: If there is no column, or two names are equal ignoring case.
    """

    @property
    def ddl(self) -> str:
        """The schema as Spark DDL; parsing it gives an equal schema."""
        return ", ".join(field.render(" ") for field in self.fields)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(field.name for field in self.fields)

    def converter(self, *, read_back: bool = False) -> Converter:
        """Compiles the function that converts one message's data to a tuple of column values.

        Each call returns a new one, for one thread: it counts the keys that it drops.

        :param read_back: See :class:`Converter`.
        """
        return Converter(self.fields, read_back=read_back)


def parse_schema(ddl: str) -> Schema:
    """Parses a schema from Spark DDL, e.g. ``"origin string not null, dep_delay double"``.

    :raises SchemaError: Naming the position of the error, the text there and what is expected.  No
        other error is raised, whatever the text.
    """
    if not isinstance(ddl, str):
        raise SchemaError(f"a schema is DDL text, not {type(ddl).__name__}")
    return _Parser(ddl).schema()


# --------------------------------------------------------------------------------------------------
# Words
# --------------------------------------------------------------------------------------------------

_SIMPLE = {
    **{kind.value: kind for kind in Atomic},
    "byte": Atomic.TINYINT,
    "short": Atomic.SMALLINT,
    "integer": Atomic.INT,
    "long": Atomic.BIGINT,
    "real": Atomic.FLOAT,
    "timestamp_ltz": Atomic.TIMESTAMP,
}
_DECIMAL = ("decimal", "dec", "numeric")
_TYPE_NAMES = (*_SIMPLE, *_DECIMAL, "array", "map", "struct")

#: Unsupported type names, of Spark or of other systems, and their replacements.
_INSTEAD = {
    "bool": "boolean",
    "bytea": "binary",
    "bytes": "binary",
    "blob": "binary",
    "char": "string",
    "datetime": "timestamp",
    "dict": "map",
    "float32": "float",
    "float64": "double",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "json": "string",
    "list": "array",
    "number": "decimal",
    "object": "struct",
    "record": "struct",
    "str": "string",
    "text": "string",
    "timestamptz": "timestamp",
    "uuid": "string",
    "varchar": "string",
    "variant": "string",
}

_TOKEN = re.compile(
    r"""
      (?P<word> [A-Za-z_][A-Za-z0-9_]*)
    | (?P<number> [0-9]+)
    | (?P<quoted> `(?:[^`]|``)*`)
    | (?P<text> '(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*")
    | (?P<mark> [<>(),:])
    """,
    re.VERBOSE | re.DOTALL,
)
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(.)|''|\"\"", re.DOTALL)
_VALID_ESCAPES = r"\n \r \t \\ \' and \""
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


class _Token(NamedTuple):
    kind: str  # a group of _TOKEN, or "end"
    text: str
    at: int

    @property
    def shown(self) -> str:
        if self.kind == "end":
            return "the end"
        return repr(self.text if len(self.text) <= 40 else self.text[:40] + "…")

    def is_word(self, *words: str) -> bool:
        return self.kind == "word" and self.text.lower() in words


# --------------------------------------------------------------------------------------------------
# Grammar
# --------------------------------------------------------------------------------------------------


class _Parser:
    """A recursive-descent parser of one text, with one token of lookahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._scan()
        self._token = next(self._tokens)

    def schema(self) -> Schema:
        if self._token.kind == "end":
            self._fail("columns such as 'name string, age int'")
        fields = self._columns(0)
        if self._token.kind != "end":
            self._fail("',', NOT NULL, COMMENT or the end")
        return Schema(fields)

    def _columns(self, depth: int) -> tuple[Field, ...]:
        seen: dict[str, str] = {}
        fields = [self._column(depth, seen)]
        while self._skip(","):
            fields.append(self._column(depth, seen))
        return tuple(fields)

    def _column(self, depth: int, seen: dict[str, str]) -> Field:
        start = self._token
        name = self._name()
        if start.is_word("struct") and self._token.text == "<":
            self._fail("a type after the name; list the columns alone, without struct<…>")
        self._skip(":")
        kind = self._type(depth)
        nullable = not self._skip_word("not")
        if not nullable and not self._skip_word("null"):
            self._fail("NULL after NOT")
        comment = self._comment() if self._skip_word("comment") else None
        try:
            field = Field(name, kind, nullable, comment)
            check_name(name, seen)
        except SchemaError as error:
            raise self._error(start.at, str(error)) from None
        return field

    def _name(self) -> str:
        token = self._token
        if token.kind == "word":
            name = token.text
        elif token.kind == "quoted":
            name = token.text[1:-1].replace("``", "`")
        else:
            self._fail("a column's name: a plain word, or anything else in backquotes")
        self._advance()
        return name

    def _type(self, depth: int) -> DataType:
        start = self._token
        word = start.text.lower()
        if start.kind != "word":
            self._fail("a type")
        if word not in _TYPE_NAMES:
            self._fail("a type", hint=_suggest_type(word))
        self._advance()
        if word in _SIMPLE:
            return _SIMPLE[word]
        if depth >= MAX_DEPTH and word not in _DECIMAL:
            raise self._error(start.at, f"types are nested more than {MAX_DEPTH} deep")
        try:
            if word in _DECIMAL:
                return self._decimal()
            return self._nested(word, depth + 1)
        except _LocatedError:
            raise
        except SchemaError as error:
            raise self._error(start.at, str(error)) from None

    def _decimal(self) -> Decimal:
        if not self._skip("("):
            return Decimal()
        precision, scale = self._number(), 0
        if self._skip(","):
            scale = self._number()
        self._expect(")")
        return Decimal(precision, scale)

    def _nested(self, word: str, depth: int) -> DataType:
        self._expect("<")
        nested: DataType
        if word == "array":
            nested = Array(self._type(depth))
        elif word == "map":
            key = self._type(depth)
            self._expect(",")
            nested = Map(key, self._type(depth))
        else:
            nested = Struct(self._columns(depth))
        if self._token.text != ">":
            self._fail("',', NOT NULL, COMMENT or '>'" if word == "struct" else "'>'")
        self._advance()
        return nested

    def _number(self) -> int:
        token = self._token
        # More digits are out of any valid range, and int() refuses thousands of them.
        if token.kind != "number" or len(token.text) > 9:
            self._fail("a small whole number")
        self._advance()
        return int(token.text)

    def _comment(self) -> str:
        token = self._token
        if token.kind != "text":
            self._fail("the comment, in quotes")
        self._advance()
        quote = token.text[0]

        def unescape(match: re.Match[str]) -> str:
            escaped = match[1]
            if escaped is None:
                # A doubled quote of the text's own kind is one quote; of the other kind, two.
                return quote if match[0][0] == quote else match[0]
            if escaped not in _ESCAPED:
                at = token.at + 1 + match.start()
                raise self._error(at, f"expected one of {_VALID_ESCAPES}, found {match[0]!r}")
            return _ESCAPED[escaped]

        return _ESCAPE.sub(unescape, token.text[1:-1])

    # ----------------------------------------------------------------------------------------------

    def _scan(self) -> Iterator[_Token]:
        text, at = self._text, 0
        while True:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # may match nothing
            if at == len(text):
                yield _Token("end", "", at)
                return
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._error(at, _describe_unexpected(text[at]))
            yield _Token(str(match.lastgroup), match[0], at)
            at = match.end()

    def _advance(self) -> None:
        self._token = next(self._tokens)

    def _skip(self, mark: str) -> bool:
        if is_next := self._token.text == mark:
            self._advance()
        return is_next

    def _skip_word(self, word: str) -> bool:
        if is_next := self._token.is_word(word):
            self._advance()
        return is_next

    def _expect(self, mark: str) -> None:
        if not self._skip(mark):
            self._fail(repr(mark))

    def _fail(self, expected: str, *, hint: str = "") -> NoReturn:
        raise self._error(self._token.at, f"expected {expected}, found {self._token.shown}{hint}")

    def _error(self, at: int, problem: str) -> _LocatedError:
        before, after = self._text[max(0, at - 20) : at], self._text[at : at + 20]
        near = f" (near {before + after!r})" if before or after else ""
        return _LocatedError(f"schema, character {at + 1}: {problem}{near}")


class _LocatedError(SchemaError):
    """An error that already contains its position; passes through the grammar unchanged."""


def _suggest_type(word: str) -> str:
    near = _INSTEAD.get(word)
    for match in () if near else difflib.get_close_matches(word[:40], _TYPE_NAMES, n=1):
        near = match
    if near is None:
        return f"; the types are {', '.join(sorted(_TYPE_NAMES))}"
    return f"; did you mean {near!r}?"


def _describe_unexpected(character: str) -> str:
    if character in "`'\"":
        return f"found {character} without the {character} that closes it"
    return (
        f"expected a name, a type or ',', found {character!r}; "
        "quote a name that is not a plain word with backquotes"
    )
