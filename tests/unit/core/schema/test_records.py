from __future__ import annotations

import enum
import re
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Context, Decimal
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_broadway.core.errors import ConversionError
from airflow_broadway.core.schema.ddl import parse_schema
from airflow_broadway.core.schema.records import MAX_DROPPED_NAMES, OTHER_KEYS
from airflow_broadway.core.schema.values import MisfitError

UTC = timezone.utc  # noqa: UP017  # as in the code under test
NOON = datetime(2013, 1, 31, 12, tzinfo=UTC)
NAIVE_NOON = datetime(2013, 1, 31, 12)  # noqa: DTZ001  # what timestamp_ntz is for


#: Digits enough for every decimal a test makes.
WIDE = Context(prec=10_000)


DAY = timedelta(days=1)
FIRST = datetime.min.replace(tzinfo=UTC)
LAST = datetime.max.replace(tzinfo=UTC)


class Gate(enum.IntEnum):
    A = 7


class Carrier(str, enum.Enum):  # noqa: UP042  # its str() is not its value
    UA = "United"


def convert(kind: str, value: Any) -> Any:
    [converted] = parse_schema(f"x {kind}").converter()({"x": value})
    return converted


# --------------------------------------------------------------------------------------------------
# Simple values
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("boolean", True, True),
        ("tinyint", -128, -128),
        ("smallint", 32_767, 32_767),
        ("int", Gate.A, 7),
        ("bigint", -(2**63), -(2**63)),
        ("float", 0.5, 0.5),
        ("float", float("inf"), float("inf")),
        ("float", 3, 3.0),
        ("double", 1e308, 1e308),
        ("double", 2**53 + 1, 2.0**53),
        ("decimal(5,2)", Decimal("123.45"), Decimal("123.45")),
        ("decimal(5,2)", Decimal("1.500"), Decimal("1.50")),
        ("decimal(5,2)", Decimal("1E+2"), Decimal("100.00")),
        ("decimal(5,2)", Decimal("0E-999999"), Decimal("0.00")),
        ("decimal(5,2)", -999, Decimal("-999.00")),
        ("decimal(38,0)", 10**38 - 1, Decimal(10**38 - 1)),
        ("string", "Zürich\0", "Zürich\0"),
        ("string", Carrier.UA, "United"),
        ("binary", b"\xff", b"\xff"),
        ("binary", bytearray(b"ab"), b"ab"),
        ("binary", memoryview(b"abcd")[::2], b"ac"),
        ("date", date(2013, 1, 31), date(2013, 1, 31)),
        ("date", "0001-01-01", date(1, 1, 1)),
        ("timestamp", NOON, NOON),
        ("timestamp", NOON.astimezone(timezone(timedelta(hours=-5))), NOON),
        ("timestamp", "2013-01-31T12:00:00Z", NOON),
        ("timestamp", "2013-01-31 12:00Z", NOON),
        ("timestamp", "2013-01-31t14:00:00+02:00", NOON),
        ("timestamp", "2013-01-31T07:00:00.000-0500", NOON),
        ("timestamp", "2013-01-31T07:00:00-05", NOON),
        ("timestamp", "2013-01-31T12:00:00.1234560z", NOON.replace(microsecond=123_456)),
        ("timestamp", "2013-01-31T12:00:00,5Z", NOON.replace(microsecond=500_000)),
        ("timestamp_ntz", NAIVE_NOON, NAIVE_NOON),
        ("timestamp_ntz", "2013-01-31T12:00:00", NAIVE_NOON),
    ],
)
def test_value_is_converted_to_its_column_type(kind, value, expected):
    converted = convert(kind, value)

    assert converted == expected
    assert type(converted) is type(expected)
    assert convert(kind, None) is None


@pytest.mark.parametrize(
    ("kind", "value", "rule"),
    [
        ("boolean", 1, "a bool (boolean), got int 1"),
        ("boolean", "true", "a bool (boolean), got str 'true'"),
        ("tinyint", 128, "an int from -128 to 127 (tinyint), never a bool, a float or text"),
        ("smallint", -32_769, "an int from -32768 to 32767"),
        ("int", 2**31, "an int from -2147483648 to 2147483647"),
        ("bigint", 2**63, "an int from -9223372036854775808 to 9223372036854775807"),
        pytest.param("bigint", 10**5000, "got int (its repr fails)", id="huge"),
        ("int", True, "got bool True"),
        ("int", 1.0, "got float 1.0"),
        ("int", float("nan"), "got float nan"),
        ("int", float("inf"), "got float inf"),
        ("int", "1", "got str '1'"),
        ("int", Decimal(1), "got Decimal Decimal('1')"),
        ("float", 3.5e38, "a float or an int in its range (float)"),
        ("float", 10**39, "a float or an int in its range (float)"),
        ("double", 10**400, "a float or an int in its range (double)"),
        ("double", Decimal("0.5"), "never a bool, a Decimal or text"),
        ("double", True, "got bool True"),
        ("double", "NaN", "got str 'NaN'"),
        ("decimal(5,2)", Decimal("1.005"), "at most 3 digits before and 2 after the point"),
        ("decimal(5,2)", Decimal(1000), "at most 3 digits before and 2 after the point"),
        ("decimal(5,2)", Decimal("1E+999999999"), "never rounded"),
        ("decimal(5,2)", Decimal("1E-999999999"), "never rounded"),
        ("decimal(5,2)", Decimal("NaN"), "(decimal(5,2))"),
        ("decimal(5,2)", Decimal("sNaN"), "(decimal(5,2))"),
        ("decimal(5,2)", Decimal("Infinity"), "(decimal(5,2))"),
        ("decimal(5,2)", 1000, "got int 1000"),
        ("decimal(5,2)", 1.5, "never a float or text, got float 1.5"),
        ("decimal(5,2)", True, "got bool True"),
        ("decimal(5,2)", "1.5", "got str '1.5'"),
        ("string", 5, "a str (string), got int 5"),
        ("string", b"a", "got bytes b'a'"),
        ("string", "a\ud800", "text that UTF-8 can encode (string), got str 'a\\ud800'"),
        ("binary", "a", "bytes, a bytearray or a memoryview (binary), got str 'a'"),
        ("binary", [1], "got list [1]"),
        ("date", NOON, "never a datetime, got datetime datetime.datetime(2013"),
        ("date", "2013-1-31", "text such as '2013-01-31' (date)"),
        ("date", "2013-01-31T00:00", "text such as '2013-01-31' (date)"),
        ("date", "2013-02-29", "a date from 0001-01-01 to 9999-12-31"),
        ("date", "0000-01-01", "a date from 0001-01-01 to 9999-12-31"),
        ("date", 15_000, "got int 15000"),
        ("timestamp", NAIVE_NOON, "(timestamp); with a time zone, got datetime"),
        ("timestamp", "2013-01-31T12:00:00", "(timestamp); with a time zone"),
        ("timestamp", "2013-01-31", "text such as '2013-01-31T12:00:00Z' (timestamp)"),
        ("timestamp", date(2013, 1, 31), "an aware datetime"),
        ("timestamp", 1_359_633_600, "an aware datetime"),
        ("timestamp", "2013-01-31T24:00:00Z", "a valid date and time"),
        ("timestamp", "2013-01-31T12:00:60Z", "a valid date and time"),
        ("timestamp", "2013-01-31T12:00:00+24:00", "a valid date and time"),
        ("timestamp", "2013-01-31T12:00:00.1234567Z", "at most six digits"),
        ("timestamp", "٢013-01-31T12:00:00Z", "an aware datetime"),
        ("timestamp", "0001-01-01T00:00:00+01:00", "a timestamp from year 1 to 9999, in UTC"),
        ("timestamp", "9999-12-31T23:59:59-01:00", "a timestamp from year 1 to 9999, in UTC"),
        ("timestamp_ntz", NOON, "(timestamp_ntz); without a time zone, got datetime"),
        ("timestamp_ntz", "2013-01-31T12:00:00Z", "(timestamp_ntz); without a time zone"),
        ("timestamp_ntz", "2013-01-31", "a naive datetime"),
        ("array<int>", "12", "a list, a tuple or another sequence (array), got str '12'"),
        ("array<int>", {1}, "got set {1}"),
        ("map<string,int>", [("a", 1)], "a mapping (map), got list [('a', 1)]"),
        ("map<date,int>", {"2013-01-31": 1, date(2013, 1, 31): 2}, "keys to differ"),
        ("map<double,int>", {float("nan"): 1}, "none to be NaN"),
        ("map<int,int>", {"1": 1}, "the map's keys to be an int from"),
        ("struct<a: int>", [1], "a mapping, a dataclass or a NamedTuple, got list [1]"),
    ],
)
def test_misfit_is_refused_with_column_rule_and_value(kind, value, rule):
    with pytest.raises(ConversionError, match=re.escape(rule)) as caught:
        convert(kind, value)
    assert str(caught.value).startswith("x: expected ")


SOME_OF_EACH = (
    *("boolean", "tinyint", "int", "double", "decimal(20,5)", "string", "binary", "date"),
    *("timestamp", "timestamp_ntz", "array<int>", "map<string,int>", "map<date,int>"),
    "struct<a: int, b: array<struct<c: string>>>",
)


@pytest.mark.parametrize("kind", SOME_OF_EACH)
def test_null_in_a_not_null_column_names_the_column(kind):
    converter = parse_schema(f"a int, `the x` {kind} not null").converter()

    for data in ({"a": 1, "the x": None}, {"a": 1}):
        with pytest.raises(ConversionError, match=r"; present and not null, got null$") as caught:
            converter(data)
        assert str(caught.value).startswith("`the x`: expected ")


def test_long_value_is_cut_in_the_message():
    with pytest.raises(MisfitError) as caught:
        convert("int", "x" * 10_000_000)
    assert caught.value.shown == "str '" + "x" * 199 + "…"
    assert caught.value.path == "x"
    assert caught.value.rule.startswith("an int from")


# --------------------------------------------------------------------------------------------------
# Records
# --------------------------------------------------------------------------------------------------


@dataclass
class Flight:
    origin: str
    seats: int


FlightTuple = namedtuple("FlightTuple", ["origin", "seats"])  # noqa: PYI024  # users have these


@pytest.mark.parametrize(
    "data",
    [
        {"seats": 3, "origin": "JFK"},
        OrderedDict(seats=3, origin="JFK"),
        MappingProxyType({"seats": 3, "origin": "JFK"}),
        Flight("JFK", 3),
        FlightTuple("JFK", 3),
    ],
)
def test_data_may_be_any_record(data):
    assert parse_schema("origin string, seats int").converter()(data) == ("JFK", 3)


@pytest.mark.parametrize("data", [None, "JFK", b"{}", ["JFK", 3], ("JFK", 3), Flight])
def test_non_record_data_is_refused(data):
    converter = parse_schema("origin string, seats int").converter()

    with pytest.raises(ConversionError, match="data: expected a mapping, a dataclass or a Named"):
        converter(data)


def test_nested_values_become_tuples_lists_and_pairs():
    converter = parse_schema(
        "id int, stops array<struct<code: string, at: double>>, tags map<string, date>"
    ).converter()

    row = converter(
        {
            "id": 1,
            "stops": ({"code": "JFK", "at": 2}, None, {}),
            "tags": {"made": "2013-01-31", "sold": None},
        }
    )

    assert row == (
        1,
        [("JFK", 2.0), None, (None, None)],
        [("made", date(2013, 1, 31)), ("sold", None)],
    )


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"stops": [{"code": "a"}, {"code": "b"}, {"code": 5}]}, "stops[2].code"),
        ({"stops": [{"by day": {"mon": [0, "x"]}}]}, "stops[0].`by day`['mon'][1]"),
        ({"stops": [{"by day": {5: []}}]}, "stops[0].`by day`"),
        ({"stops": [7]}, "stops[0]"),
        ({"stops": 7}, "stops"),
    ],
)
def test_path_leads_to_the_value(data, path):
    converter = parse_schema(
        "stops array<struct<code: string, `by day`: map<string, array<int>>>>"
    ).converter()

    with pytest.raises(MisfitError) as caught:
        converter(data)

    assert caught.value.path == path


def test_dropped_keys_are_counted_by_name():
    # Given a converter, and data with more keys than columns
    converter = parse_schema("id int, stops array<struct<code: string>>").converter()
    data = {"id": 1, "ID": 2, "stops": [{"code": "a", "gate": 1}, {"gate": 2}], 5: None}

    # When it converts twice
    assert converter(data) == (1, [("a",), (None,)])
    converter(data)

    # Then each dropped key is counted where it stood
    assert converter.dropped == {"ID": 2, "stops[].gate": 4, "int 5": 2}


def test_hostile_keys_fill_neither_memory_nor_log():
    converter = parse_schema("id int").converter()

    for number in range(MAX_DROPPED_NAMES + 50):
        converter({f"{number}\ud800" + "x" * 1000: 1})

    assert len(converter.dropped) == MAX_DROPPED_NAMES + 1
    assert converter.dropped[OTHER_KEYS] == 50
    assert all(len(name.encode()) < 300 for name in converter.dropped)


def test_value_whose_repr_fails_is_still_refused():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    with pytest.raises(ConversionError, match=r"got Broken \(its repr fails\)"):
        convert("int", Broken())


# --------------------------------------------------------------------------------------------------
# Properties
# --------------------------------------------------------------------------------------------------


@given(st.integers(1, 38), st.data())
def test_decimal_is_exact_or_refused(precision, data):
    scale = data.draw(st.integers(0, precision))
    value = data.draw(
        st.decimals(allow_nan=False, allow_infinity=False)
        | st.decimals(places=scale, min_value=-100, max_value=100)
        | st.integers(-(10**40), 10**40)
    )
    _, digits, exponent = Decimal(value).normalize(WIDE).as_tuple()
    assert isinstance(exponent, int)
    fits = value == 0 or (exponent >= -scale and len(digits) + exponent <= precision - scale)

    try:
        converted = convert(f"decimal({precision},{scale})", value)
    except ConversionError:
        assert not fits
    else:
        assert fits
        assert converted == value
        assert converted.as_tuple().exponent == -scale


@given(st.datetimes(timezones=st.timezones() | st.none()))
def test_timestamp_keeps_its_moment(moment):
    aware = moment.tzinfo is not None
    kind, other = ("timestamp", "timestamp_ntz") if aware else ("timestamp_ntz", "timestamp")
    # Near the ends of the calendar, UTC's year may be none of its years.
    if aware and not FIRST + DAY < moment < LAST - DAY:
        return
    expected = moment.astimezone(UTC) if aware else moment

    assert convert(kind, moment) == expected
    assert convert(kind, expected.isoformat()) == expected
    with pytest.raises(ConversionError):
        convert(other, moment)


anything = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.decimals(), st.text()),
        *(st.binary(), st.dates(), st.datetimes(), st.timedeltas(), st.complex_numbers()),
        *(st.text(st.characters(categories=["Cs", "Lu"])), st.just(object())),
    ),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=5,
)


@given(st.sampled_from(SOME_OF_EACH), anything)
def test_any_value_is_converted_or_refused_with_a_conversion_error(kind, value):
    try:
        convert(kind, value)
    except ConversionError as error:
        str(error).encode()  # it can be logged
