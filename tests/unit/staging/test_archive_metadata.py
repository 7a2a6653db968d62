"""Metadata as an archive keeps it: one text a message, whatever its neighbours have."""

from __future__ import annotations

import pytest

from airflow_broadway.staging.archive.metadata import metadata_of, texts_of


@pytest.mark.parametrize(
    "metadata",
    [
        [{"queue": "q", "at": "1"}, {"queue": "q", "at": "1"}, {"queue": "q", "at": "2"}, {}],
        [{}, {"a": "x"}, {"b": "x"}, {"a": "x"}],
        [{"a": 1}, {"a": True}, {"a": 1.0}],
        [{"!": "a key that is a mark"}, {"!": "a key that is a mark"}, {"a": "x"}],
        [{"a": "é\ud800"}, {"a": "é\ud800"}],
        [{"a": {"b": [1, None]}}, {"a": {"b": [1, None]}}],
    ],
)
def test_each_message_keeps_its_own_metadata(metadata):
    parsed = [metadata_of(text) for text in texts_of(metadata)]

    assert parsed == metadata
    types = [
        [[type(value) for value in row.values()] for row in rows] for rows in (parsed, metadata)
    ]
    assert types[0] == types[1], "1, True and 1.0 are equal, and not the same"
