from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_broadway.core.errors import SchemaError
from airflow_broadway.core.schema.ddl import MAX_DEPTH, Schema, parse_schema
from airflow_broadway.core.schema.types import Array, Atomic, DataType, Decimal, Field, Map, Struct

# --------------------------------------------------------------------------------------------------
# What is read
# --------------------------------------------------------------------------------------------------


def test_schema_is_read_column_by_column():
    schema = parse_schema("origin string not null, dep_delay double, seats smallint")

    assert schema == Schema(
        (
            Field("origin", Atomic.STRING, nullable=False),
            Field("dep_delay", Atomic.DOUBLE),
            Field("seats", Atomic.SMALLINT),
        )
    )
    assert schema.names == ("origin", "dep_delay", "seats")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("BOOLEAN", Atomic.BOOLEAN),
        ("tinyint", Atomic.TINYINT),
        ("byte", Atomic.TINYINT),
        ("smallint", Atomic.SMALLINT),
        ("short", Atomic.SMALLINT),
        ("int", Atomic.INT),
        ("Integer", Atomic.INT),
        ("bigint", Atomic.BIGINT),
        ("long", Atomic.BIGINT),
        ("float", Atomic.FLOAT),
        ("real", Atomic.FLOAT),
        ("double", Atomic.DOUBLE),
        ("string", Atomic.STRING),
        ("binary", Atomic.BINARY),
        ("date", Atomic.DATE),
        ("timestamp", Atomic.TIMESTAMP),
        ("timestamp_ltz", Atomic.TIMESTAMP),
        ("timestamp_ntz", Atomic.TIMESTAMP_NTZ),
        ("decimal", Decimal(10, 0)),
        ("dec(5)", Decimal(5, 0)),
        ("numeric(38, 38)", Decimal(38, 38)),
        ("array<array<int>>", Array(Array(Atomic.INT))),
        ("MAP<string, array<double>>", Map(Atomic.STRING, Array(Atomic.DOUBLE))),
        (
            "struct<a: int not null, b string, `c d`: date>",
            Struct(
                (
                    Field("a", Atomic.INT, nullable=False),
                    Field("b", Atomic.STRING),
                    Field("c d", Atomic.DATE),
                )
            ),
        ),
    ],
)
def test_every_type_of_the_grammar_is_read(text, kind):
    assert parse_schema(f"x {text}") == Schema((Field("x", kind),))


def test_colon_may_follow_the_name():
    assert parse_schema("a: int, b : string") == parse_schema("a int, b string")


def test_keywords_may_be_column_names():
    assert parse_schema("comment string, `not` int, date date").names == ("comment", "not", "date")


def test_backquoted_name_may_hold_anything():
    assert parse_schema("`größe, in ``cm``` int").names == ("größe, in `cm`",)


@pytest.mark.parametrize("text", [r"'it\'s'", "'it''s'", '"it\'s"'])
def test_comment_is_kept(text):
    schema = parse_schema(f"a int not null comment {text}")

    assert schema.fields == (Field("a", Atomic.INT, nullable=False, comment="it's"),)
    assert schema.ddl == r"a int not null comment 'it\'s'"


def test_rendered_ddl_is_canonical():
    schema = parse_schema("A INTEGER,`b c` Struct<X:DEC(4,2) NOT NULL,y Map<Short,Real>>")

    assert schema.ddl == "A int, `b c` struct<X: decimal(4,2) not null, y: map<smallint, float>>"
    assert Struct(schema.fields).ddl == (
        "struct<A: int, `b c`: struct<X: decimal(4,2) not null, y: map<smallint, float>>>"
    )


# --------------------------------------------------------------------------------------------------
# What is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "schema, character 1: expected columns such as 'name string, age int', found the end"),
        ("origin strng", "schema, character 8: expected a type, found 'strng'; did you mean"),
        ("origin strng", "; did you mean 'string'? (near 'origin strng')"),
        ("a varchar(10)", "character 3: expected a type, found 'varchar'; did you mean 'string'?"),
        ("a int64", "did you mean 'bigint'?"),
        ("a wxyz", "found 'wxyz'; the types are array, bigint, binary,"),
        ("a", "character 2: expected a type, found the end"),
        ("a int,", "character 7: expected a column's name: a plain word"),
        ("a int b int", "character 7: expected ',', NOT NULL, COMMENT or the end, found 'b'"),
        ("a int not", "expected NULL after NOT, found the end"),
        ("a int comment x", "expected the comment, in quotes, found 'x'"),
        (r"a int comment 'a\x'", r"character 17: expected one of \n \r \t \\ \' and \", found"),
        ("a int comment 'x", "character 15: found ' without the ' that closes it"),
        ("`a int", "character 1: found ` without the ` that closes it"),
        (
            "a-b int",
            "character 2: expected a name, a type or ',', found '-'; quote a name that is not",
        ),
        ("1a int", "character 1: expected a column's name"),
        ("`` int", "character 1: a column needs a name"),
        ("a decimal(39, 0)", "character 3: a decimal's precision is from 1 to 38, not 39"),
        ("a decimal(0)", "a decimal's precision is from 1 to 38, not 0"),
        ("a decimal(5, 6)", "a decimal's scale is from 0 to its precision 5, not 6"),
        ("a decimal(5, -1)", "found '-'"),
        ("a decimal()", "expected a small whole number, found ')'"),
        (f"a decimal({'9' * 5000})", "expected a small whole number, found '9999"),
        ("a array", "expected '<', found the end"),
        ("a array<int", "character 12: expected '>', found the end"),
        ("a map<string>", "expected ',', found '>'"),
        ("a map<array<int>, int>", "character 3: a map's key is a simple type, not array<int>"),
        ("a struct<>", "character 10: expected a column's name"),
        ("struct<a int>", "list the columns alone, without struct<…>"),
        ("a int, a string", "character 8: two columns are named a"),
        ("a int, b struct<x int, X int>", "character 24: columns x and X differ only in case"),
        ("a int\ud800", r"found '\ud800'"),
        ("`\ud800` int", "cannot be encoded as UTF-8"),
    ],
)
def test_mistake_is_named_with_its_place(text, message):
    with pytest.raises(SchemaError, match=re.escape(message)) as caught:
        parse_schema(text)
    assert str(caught.value).count("character ") == 1
    str(caught.value).encode()


def test_schema_must_be_text():
    with pytest.raises(SchemaError, match="a schema is DDL text, not dict"):
        parse_schema({"a": "int"})  # type: ignore[arg-type]


def test_types_nest_up_to_a_limit():
    # Given the deepest schema, and one deeper
    deepest = "a " + "array<" * MAX_DEPTH + "int" + ">" * MAX_DEPTH
    deeper = "a " + "array<" * 10_000

    # Then the first is read, and of the second the limit is named
    assert parse_schema(deepest).ddl == deepest
    with pytest.raises(SchemaError, match=f"types are nested more than {MAX_DEPTH} deep"):
        parse_schema(deeper)


def test_types_built_by_hand_obey_the_same_rules():
    with pytest.raises(SchemaError, match="at least one column"):
        Schema(())
    with pytest.raises(SchemaError, match="columns a and A differ only in case"):
        Struct((Field("a", Atomic.INT), Field("A", Atomic.INT)))
    with pytest.raises(SchemaError, match="a map's key is a simple type"):
        Map(Array(Atomic.INT), Atomic.INT)


# --------------------------------------------------------------------------------------------------
# Properties
# --------------------------------------------------------------------------------------------------

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
decimals = st.integers(1, 38).flatmap(
    lambda precision: st.builds(Decimal, st.just(precision), st.integers(0, precision))
)
simple: st.SearchStrategy[DataType] = st.one_of(st.sampled_from(Atomic), decimals)


def fields_of(kinds: st.SearchStrategy[DataType]) -> st.SearchStrategy[tuple[Field, ...]]:
    field = st.builds(
        Field,
        names,
        kinds,
        st.booleans(),
        st.none() | st.text(st.characters(codec="utf-8"), max_size=10),
    )
    return st.lists(field, min_size=1, max_size=4, unique_by=lambda f: f.name.lower()).map(tuple)


kinds: st.SearchStrategy[DataType] = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.builds(Array, inner), st.builds(Map, simple, inner), st.builds(Struct, fields_of(inner))
    ),
    max_leaves=6,
)


@given(fields_of(kinds).map(Schema))
def test_schema_is_read_back_from_its_own_ddl(schema):
    assert parse_schema(schema.ddl) == schema
    assert parse_schema(f"data {Struct(schema.fields).ddl}").fields[0].type == Struct(schema.fields)


fragments = st.sampled_from(
    [*" ,<>():`'\"\\9-\né\ud800\0", "a", "int", "not", "null", "comment", "decimal", "array", "map"]
)


@given(st.text() | st.lists(fragments, max_size=30).map("".join))
def test_any_text_is_a_schema_or_a_schema_error(text):
    try:
        schema = parse_schema(text)
    except SchemaError as error:
        str(error).encode()  # it can be logged
    else:
        assert parse_schema(schema.ddl) == schema
