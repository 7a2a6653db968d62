"""Counts in texts for people."""

from __future__ import annotations

import pytest

from airflow_broadway.core.text import pluralize, without_outcome


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "message", "0 messages"),
        (1, "message", "1 message"),
        (2, "message", "2 messages"),
        (12_345, "dead letter", "12,345 dead letters"),
        (1, "batch", "1 batch"),
        (2, "batch", "2 batches"),
    ],
)
def test_counts_are_pluralized(number, noun, text):
    assert pluralize(number, noun) == text


@pytest.mark.parametrize(
    ("count", "batches", "text"),
    [
        (1, 1, "1 of 1 batch has no outcome"),
        (1, 3, "1 of 3 batches has no outcome"),
        (2, 3, "2 of 3 batches have no outcome"),
    ],
)
def test_batches_without_outcome_are_counted_in_a_sentence(count, batches, text):
    assert without_outcome(count, batches) == text
