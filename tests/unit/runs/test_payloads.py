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
def test_a_payload_is_shown_in_the_form_that_suits_it_or_is_asked_for(
    raw: bytes, form: str | None, shown: str, text: str
) -> None:
    found = payload_of(raw, form=form)

    assert (found.form, found.text, found.size, found.cut) == (shown, text, len(raw), False)


def test_what_is_no_json_says_so_and_is_shown_as_text() -> None:
    assert payload_of(b"{", form="json").note == "It is no JSON."
    assert payload_of(b"[" * 100_000, form="json").form == "text"
    long = payload_of(b'{"a": ', size=600_000, form="json")
    assert (long.form, long.cut, long.note) == (
        "text",
        True,
        "It is too long to be laid out as JSON.",
    )
    assert payload_of(b"{").note == ""


def test_a_payload_is_cut_in_each_form() -> None:
    assert payload_of(b"x" * 11, most=10).text == "x" * 10
    assert payload_of(b"x" * 11, most=10).cut
    assert not payload_of(b"x" * 10, most=10).cut
    in_hex = payload_of(b"x" * 17, form="hex", most=64)
    assert (in_hex.text.count("\n"), in_hex.cut) == (0, True)
    assert payload_of(b"[1, 2, 3, 4]", most=10).cut
    # Cut within a character it is text all the same.
    assert payload_of("ü".encode()[:1], size=2).form == "text"


def test_what_a_callback_made_is_shown_as_json() -> None:
    made = payload_of({"at": datetime(2026, 1, 31, tzinfo=UTC), "n": 1})
    assert (made.form, made.size) == ("json", 43)
    assert made.text == '{\n  "at": "2026-01-31 00:00:00+00:00",\n  "n": 1\n}'
    assert payload_of("7").text == '"7"'


def test_what_is_nested_deep_is_not_laid_out_whole() -> None:
    # Given an array whose lines would be 900 characters deep each
    raw = json.dumps(_nested(400, ["x"] * 20_000)).encode()

    found = payload_of(raw, form="json")

    assert (found.form, found.cut, len(found.text)) == ("json", True, 4096)


def _nested(depth: int, value: object) -> object:
    for _ in range(depth):
        value = [value]
    return value
