"""Payloads as people see them."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from airflow_broadway.runs.reading.payload import payload_of


@pytest.mark.parametrize(
    ("raw", "form", "shown", "text"),
    [
        (b'{"b": [1, "\xc3\xbc"]}', None, "json", '{\n  "b": [\n    1,\n    "ü"\n  ]\n}'),
        (b'{"b": 1}', "text", "text", '{"b": 1}'),
        (b'{"b": 1}', "hex", "hex", "00000000  7b 22 62 22 3a 20 31 7d"),
        (b"12", None, "text", "12"),
        (b"12", "json", "json", "12"),
        (b"\x00\xffab", None, "hex", "00000000  00 ff 61 62"),
        (b"\xffab", "text", "text", "\\xffab"),
        (b"a\x1b[2J\xe2\x80\xaeb\nc", None, "text", "a\\x1b[2J\\u202eb\nc"),
        (b"", None, "text", ""),
    ],
)
def test_payload_form_is_guessed_or_requested(raw, form, shown, text):
    payload = payload_of(raw, form=form)

    assert (payload.form, payload.text, payload.size, payload.cut) == (shown, text, len(raw), False)


def test_invalid_json_is_shown_as_text_with_a_note():
    assert payload_of(b"{", form="json").note == "It is no JSON."
    assert payload_of(b"[" * 100_000, form="json").form == "text"
    long = payload_of(b'{"a": ', size=600_000, form="json")
    assert (long.form, long.cut, long.note) == (
        "text",
        True,
        "It is too long to be laid out as JSON.",
    )
    assert payload_of(b"{").note == ""


def test_payload_is_cut_in_each_form():
    assert payload_of(b"x" * 11, most=10).text == "x" * 10
    assert payload_of(b"x" * 11, most=10).cut
    assert not payload_of(b"x" * 10, most=10).cut
    in_hex = payload_of(b"x" * 17, form="hex", most=64)
    assert (in_hex.text.count("\n"), in_hex.cut) == (0, True)
    assert payload_of(b"[1, 2, 3, 4]", most=10).cut
    # Cut within a character it is text all the same.
    assert payload_of("ü".encode()[:1], size=2).form == "text"


def test_result_of_a_callback_is_shown_as_json():
    payload = payload_of({"at": datetime(2026, 1, 31, tzinfo=UTC), "n": 1})
    assert (payload.form, payload.size) == ("json", 43)
    assert payload.text == '{\n  "at": "2026-01-31 00:00:00+00:00",\n  "n": 1\n}'
    assert payload_of("7").text == '"7"'


def test_deeply_nested_json_is_cut():
    # Given an array whose lines would be 900 characters deep each
    raw = json.dumps(_nested(400, ["x"] * 20_000)).encode()

    payload = payload_of(raw, form="json")

    assert (payload.form, payload.cut, len(payload.text)) == ("json", True, 4096)


def _nested(depth: int, value: object) -> object:
    for _ in range(depth):
        value = [value]
    return value
