from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal as Number
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_broadway.core.errors import ConversionError
from airflow_broadway.core.schema.ddl import Schema, parse_schema
from airflow_broadway.core.schema.types import Array, Atomic, DataType, Decimal, Field, Map, Struct
from airflow_broadway.staging.arrow_schema import (
    SPARK_FILE_METADATA,
    arrow_struct,
    arrow_type,
    columns_from_rows,
    from_arrow,
)
from tests.unit.spark.session import spark_session

EVERY_TYPE = """
    a boolean, b tinyint, c smallint, d int, e bigint, f float, g double, h decimal(20,4),
    i string not null, j binary, k date, l timestamp, m timestamp_ntz, n array<array<int>>,
    o map<string, struct<x: timestamp, y: decimal(38,38)>>,
    p struct<q: string not null, `r s`: date>
"""
FLOAT_MAX = 3.4028234663852886e38
RECORDS: list[dict[str, Any]] = [
    {
        "a": True,
        "b": -128,
        "c": 32_767,
        "d": -(2**31),
        "e": 2**63 - 1,
        "f": 0.5,
        "g": 1e308,
        "h": Number("1234567890123456.7891"),
        "i": "Zürich\0",
        "j": b"\xff\x00",
        "k": date(1, 1, 1),
        "l": datetime(1, 1, 1, tzinfo=UTC),
        "m": datetime(9999, 12, 31, 23, 59, 59, 999_999),  # noqa: DTZ001
        "n": [[1, None], None, []],
        "o": {
            "one": {"x": datetime(2013, 1, 31, 12, tzinfo=UTC), "y": Number("1E-38")},
            "none": None,
        },
        "p": {"q": "", "r s": date(9999, 12, 31)},
    },
    {"i": "nothing else"},
]


def records_as_read(records: list[dict[str, Any]], schema: Schema) -> list[dict[str, Any]]:
    return [{name: record.get(name) for name in schema.names} for record in records]


def stored(schema: Schema, records: list[dict[str, Any]], path: Path) -> pa.StructArray:
    column = columns_from_rows([*map(schema.converter(), records)], schema)
    table = pa.Table.from_struct_array(column).replace_schema_metadata(SPARK_FILE_METADATA)
    pq.write_table(table, path, compression="zstd")
    return column


# --------------------------------------------------------------------------------------------------
# Types
# --------------------------------------------------------------------------------------------------


def test_each_type_has_the_arrow_type_of_spark():
    y = pa.decimal128(38, 38)
    types: list[tuple[str, pa.DataType]] = [
        ("a", pa.bool_()),
        ("b", pa.int8()),
        ("c", pa.int16()),
        ("d", pa.int32()),
        ("e", pa.int64()),
        ("f", pa.float32()),
        ("g", pa.float64()),
        ("h", pa.decimal128(20, 4)),
        ("i", pa.string()),
        ("j", pa.binary()),
        ("k", pa.date32()),
        ("l", pa.timestamp("us", tz="UTC")),
        ("m", pa.timestamp("us")),
        ("n", pa.list_(pa.list_(pa.int32()))),
        ("o", pa.map_(pa.string(), pa.struct([("x", pa.timestamp("us", tz="UTC")), ("y", y)]))),
        ("p", pa.struct([pa.field("q", pa.string(), False), pa.field("r s", pa.date32())])),
    ]

    assert list(arrow_struct(parse_schema(EVERY_TYPE))) == [
        pa.field(name, kind, nullable=name != "i") for name, kind in types
    ]


def test_one_column_can_hold_all_schemas():
    schema = parse_schema("a int not null, b string")

    assert arrow_struct(schema) == arrow_type(schema)


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------


def test_rows_round_trip_through_parquet(tmp_path):
    # Given records of every type, converted and stored
    schema = parse_schema(EVERY_TYPE)
    column = stored(schema, RECORDS, tmp_path / "rows.parquet")

    # When the file is read
    table = pq.read_table(tmp_path / "rows.parquet")

    # Then it has the schema's types, and the values as they were, instants in plain UTC
    assert table.schema.equals(pa.schema(list(arrow_struct(schema))))
    rebuilt = from_arrow(table.to_struct_array())
    assert rebuilt == records_as_read(RECORDS, schema) == from_arrow(column)
    assert rebuilt[0]["l"].tzinfo is UTC
    assert rebuilt[0]["o"]["one"]["x"].tzinfo is UTC
    assert rebuilt[0]["m"].tzinfo is None


def test_no_rows_are_a_column_of_the_right_type():
    schema = parse_schema(EVERY_TYPE)

    column = columns_from_rows([], schema)

    assert column.type == arrow_struct(schema)
    assert from_arrow(column) == []


def test_timestamps_are_plain_utc_in_lists_and_keys():
    schema = parse_schema("a array<timestamp>, b map<timestamp, timestamp>")
    noon = datetime(2013, 1, 31, 12, tzinfo=UTC)
    rows = [([noon, None], [(noon, None)]), ([], []), (None, None)]

    [first, *rest] = from_arrow(columns_from_rows(rows, schema))

    assert first == {"a": [noon, None], "b": {noon: None}}
    assert first["a"][0].tzinfo is UTC
    assert next(iter(first["b"])).tzinfo is UTC
    assert rest == [{"a": [], "b": {}}, {"a": None, "b": None}]


def test_slices_and_chunked_columns_give_their_own_values():
    # Given a column whose nested values start before the slice
    schema = parse_schema(EVERY_TYPE)
    column = columns_from_rows([*map(schema.converter(), RECORDS * 3)], schema)
    records = records_as_read(RECORDS * 3, schema)

    # Then a slice and a column of slices give their own values alone
    for start in range(len(records)):
        assert from_arrow(column.slice(start, 2)) == records[start : start + 2]
    pieces = pa.chunked_array([column.slice(3), column.slice(0, 3)])
    assert from_arrow(pieces) == records[3:] + records[:3]


# --------------------------------------------------------------------------------------------------
# Property: what a converter makes, Arrow and Parquet take and give back
# --------------------------------------------------------------------------------------------------

text = st.text(st.characters(codec="utf-8"), max_size=8)
naive = st.datetimes()


def number(kind: Decimal) -> st.SearchStrategy[Any]:
    whole_numbers = 10 ** (kind.precision - kind.scale) - 1
    return st.integers(-(10**kind.precision) + 1, 10**kind.precision - 1).map(
        lambda digits: Number(f"{digits}E-{kind.scale}")
    ) | st.integers(-whole_numbers, whole_numbers)


def whole(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


VALUES: dict[Atomic, st.SearchStrategy[Any]] = {
    Atomic.BOOLEAN: st.booleans(),
    Atomic.TINYINT: whole(8),
    Atomic.SMALLINT: whole(16),
    Atomic.INT: whole(32),
    Atomic.BIGINT: whole(64),
    Atomic.FLOAT: st.floats(width=32, allow_nan=False),
    Atomic.DOUBLE: st.floats(allow_nan=False) | whole(64),
    Atomic.STRING: text,
    Atomic.BINARY: st.binary(max_size=8),
    Atomic.DATE: st.dates() | st.dates().map(date.isoformat),
    Atomic.TIMESTAMP: st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat),
    Atomic.TIMESTAMP_NTZ: naive | naive.map(datetime.isoformat),
}


def value(kind: DataType) -> st.SearchStrategy[Any]:
    match kind:
        case Struct(fields):
            return record(fields)
        case Array(element):
            return st.lists(st.none() | value(element), max_size=3)
        case Map(key, item):
            return st.dictionaries(value(key), st.none() | value(item), max_size=3)
        case Decimal():
            return number(kind)
        case Atomic():
            return VALUES[kind]


def record(fields: tuple[Field, ...]) -> st.SearchStrategy[dict[str, Any]]:
    needed = {field.name: value(field.type) for field in fields if not field.nullable}
    others = {field.name: st.none() | value(field.type) for field in fields if field.nullable}
    return st.fixed_dictionaries(needed, optional=others)


decimals = st.integers(1, 38).flatmap(
    lambda precision: st.builds(Decimal, st.just(precision), st.integers(0, precision))
)
simple: st.SearchStrategy[DataType] = st.one_of(st.sampled_from(Atomic), decimals)
#: Dates and instants may be given as text too, and then two keys can stand for one.
keys = st.sampled_from([Atomic.STRING, Atomic.BIGINT, Atomic.BOOLEAN, Atomic.TIMESTAMP])


def fields_of(kinds: st.SearchStrategy[DataType]) -> st.SearchStrategy[tuple[Field, ...]]:
    names = st.sampled_from(["a", "b c", "d.e", "ü", "`"])
    field = st.builds(Field, names, kinds, st.booleans())
    return st.lists(field, min_size=1, max_size=4, unique_by=lambda f: f.name).map(tuple)


kinds: st.SearchStrategy[DataType] = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.builds(Array, inner), st.builds(Map, keys, inner), st.builds(Struct, fields_of(inner))
    ),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_converted_values_round_trip_through_parquet(tmp_path, data):
    # Given any schema, and records that fit it
    schema = Schema(data.draw(fields_of(kinds)))
    records = data.draw(st.lists(record(schema.fields), max_size=4))
    converter = schema.converter()

    # When they are converted, stored, read and converted once more
    stored(schema, records, tmp_path / "rows.parquet")
    rebuilt = from_arrow(pq.read_table(tmp_path / "rows.parquet").to_struct_array())

    # Then nothing has changed: not a digit, not a null
    assert [converter(record) for record in rebuilt] == [converter(record) for record in records]
    assert not converter.dropped


@given(st.floats() | st.integers(-(10**39), 10**39))
def test_float_column_keeps_finite_numbers_finite(x):
    schema = parse_schema("x float")
    try:
        row = schema.converter()({"x": x})
    except ConversionError:
        assert abs(x) > FLOAT_MAX
        return
    [read] = from_arrow(columns_from_rows([row], schema))
    assert math.isfinite(read["x"]) == math.isfinite(x)


# --------------------------------------------------------------------------------------------------
# Spark
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def spark():
    return spark_session()


def without_nullability(kind: Any) -> Any:
    """Drops nullability, since Spark makes every column of a file nullable."""
    if isinstance(kind, dict):
        flags = ("nullable", "containsNull", "valueContainsNull", "metadata")
        return {key: without_nullability(item) for key, item in kind.items() if key not in flags}
    if isinstance(kind, list):
        return [without_nullability(item) for item in kind]
    return kind


@pytest.mark.spark
def test_spark_reads_the_types_of_its_own_ddl(spark, tmp_path):
    from pyspark.sql.types import StructType

    # Given the records of every type, stored, and our DDL as Spark's own parser reads it
    schema = parse_schema(EVERY_TYPE + ", `k``ey` array<string> not null comment 'it''s \\\\ \\n'")
    records = [{**record, "k`ey": ["x"]} for record in RECORDS]
    stored(schema, records, tmp_path / "rows.parquet")
    meant = StructType.fromDDL(schema.ddl)
    assert isinstance(meant, StructType)

    # When Spark reads the file
    frame = spark.read.parquet(str(tmp_path / "rows.parquet"))

    # Then its types are those, and its values ours
    assert without_nullability(frame.schema.jsonValue()) == without_nullability(meant.jsonValue())
    assert [field.nullable for field in meant] == [field.nullable for field in schema.fields]
    assert meant["k`ey"].metadata == {"comment": "it's \\ \n"}
    frame_json = frame.selectExpr(
        "to_json(struct(a, b, c, d, e, f, i, k, n, p)) as data",
        "cast(h as string) as h",
        "hex(j) as j",
        "date_format(l, 'yyyy-MM-dd HH:mm:ss') as l",
        "cast(m as string) as m",
        "cast(o['one'].y as string) as y",
        "unix_micros(o['one'].x) as x",
    ).collect()
    same = {name: RECORDS[0][name] for name in "abcdefin"}
    dates = {"k": "0001-01-01", "p": {"q": "", "r s": "9999-12-31"}}
    assert json.loads(frame_json[0]["data"]) == {**same, **dates}
    assert frame_json[0].asDict() | {"data": ""} == {
        "data": "",
        "h": "1234567890123456.7891",
        "j": "FF00",
        "l": "0001-01-01 00:00:00",
        "m": "9999-12-31 23:59:59.999999",
        "y": "0." + "0" * 37 + "1",
        "x": 1_359_633_600_000_000,
    }
    assert json.loads(frame_json[1]["data"]) == {"i": "nothing else"}
