from __future__ import annotations

import json
import re
import uuid
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from airflow_broadway.core.errors import ConversionError
from airflow_broadway.core.schema.encoding import (
    dump_metadata,
    encode_json,
    encode_metadata,
    load_metadata,
)

NAN = float("nan")
EVENING = datetime(2013, 1, 31, 19, tzinfo=timezone(timedelta(hours=7)))
NAIVE_NOON = datetime(2013, 1, 31, 12)  # noqa: DTZ001  # it has no zone to lose
ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ("Zürich", '"Zürich"'),
        ([1, 2.5, True, {"a": ()}], '[1,2.5,true,{"a":[]}]'),
        (10**30, "1" + "0" * 30),
        (Decimal("1.50"), '"1.50"'),
        (date(2013, 1, 31), '"2013-01-31"'),
        (EVENING, '"2013-01-31T12:00:00+00:00"'),
        (NAIVE_NOON, '"2013-01-31T12:00:00"'),
        (ID, f'"{ID}"'),
        (MappingProxyType({"a": MappingProxyType({"b": 1})}), '{"a":{"b":1}}'),
    ],
)
def test_data_is_written_as_compact_json(value: Any, text: str) -> None:
    assert encode_json(value) == text


def circle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"\xff", "data: expected a JSON value; decode bytes, or declare a schema, got byt"),
        ({"a": [0, {"b c": b"x"}]}, "data.a[1]['b c']: expected a JSON value; decode"),
        ({"a": NAN}, "data.a: expected a finite number, as JSON has no other, got float nan"),
        ([float("inf")], "data[0]: expected a finite number"),
        (Decimal("NaN"), "data: expected a JSON value, got Decimal Decimal('NaN')"),
        ({"a": {1: 2, "1": 3}}, "data.a: expected keys that are text, got int 1"),
        ({"a": MappingProxyType({None: 2})}, "data.a: expected keys that are text, got null"),
        ({"a": "\ud800"}, "data.a: expected text that UTF-8 can encode, got str '\\ud800'"),
        ({"\ud800": 1}, "data: expected keys that UTF-8 can encode"),
        ({"a": {1, 2}}, "data.a: expected a JSON value, got set {1, 2}"),
        ([10**5000], "data[0]: expected a JSON value, got int (its repr fails)"),
        (circle(), "data: expected data nested less deeply, without circular references"),
    ],
)
def test_what_json_cannot_carry_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(ConversionError, match=re.escape(message)):
        encode_json(value)


def test_metadata_is_text_under_each_key() -> None:
    assert encode_metadata(
        {
            "routing_key": "flights",
            "priority": 5,
            "none": None,
            "flag": True,
            "headers": {"raw": b"\xff", "text": b"ok", "score": NAN, "when": [EVENING]},
            "made": EVENING,
            "price": Decimal("1.50"),
            "raw": b"\xff\x00",
            "text": "Zürich".encode(),
            "score": float("-inf"),
        }
    ) == {
        "routing_key": "flights",
        "priority": "5",
        "none": "null",
        "flag": "true",
        "headers": '{"raw":"base64:/w==","text":"ok","score":"NaN",'
        '"when":["2013-01-31T12:00:00+00:00"]}',
        "made": "2013-01-31T12:00:00+00:00",
        "price": "1.50",
        "raw": "base64:/wA=",
        "text": "Zürich",
        "score": "-Infinity",
    }


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"a": object()}, "metadata['a']: expected a JSON value, got object <object"),
        ({"a": {"b": {1}}}, "metadata['a'].b: expected a JSON value, got set {1}"),
        ({"a": "\ud800"}, "metadata['a']: expected text that UTF-8 can encode"),
        ({"a": circle()}, "metadata['a']: expected data nested less deeply"),
    ],
)
def test_metadata_refuses_what_no_broker_sends(metadata: Any, message: str) -> None:
    with pytest.raises(ConversionError, match=re.escape(message)):
        encode_metadata(metadata)


@pytest.mark.parametrize("write", [encode_metadata, dump_metadata])
@pytest.mark.parametrize("key", [5, "\ud800"])
def test_metadata_keys_are_text_that_can_be_encoded(write: Any, key: Any) -> None:
    with pytest.raises(ConversionError, match="metadata: expected keys that are text"):
        write({key: "x"})


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
)


@given(json_values)
@example(5)
@example([])
def test_json_values_come_back_as_they_were(value: Any) -> None:
    assert json.loads(encode_json(value)) == value
    encode_metadata({"value": value})["value"].encode()
    assert repr(load_metadata(dump_metadata({"value": value}))) == repr({"value": value})


anything = st.recursive(
    st.one_of(
        *(st.none(), st.integers(), st.floats(), st.decimals(), st.text(), st.binary()),
        *(st.datetimes(timezones=st.timezones() | st.none()), st.just(object())),
        st.text(st.characters(categories=["Cs", "Lu"])),
    ),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=5,
)


@given(anything)
def test_any_value_is_encoded_or_refused_with_a_conversion_error(value: Any) -> None:
    for encode in (encode_json, lambda value: encode_metadata({"value": value})):
        try:
            encode(value)
        except ConversionError as error:
            str(error).encode()  # it can be logged
