"""How counts are told to people."""

from __future__ import annotations

import pytest

from airflow_broadway.core.text import many, without_outcome


@pytest.mark.parametrize(
    ("number", "noun", "told"),
    [
        (0, "message", "0 messages"),
        (1, "message", "1 message"),
        (2, "message", "2 messages"),
        (12_345, "dead letter", "12,345 dead letters"),
        (1, "batch", "1 batch"),
        (2, "batch", "2 batches"),
    ],
)
def test_one_is_told_as_one_and_many_as_many(number: int, noun: str, told: str) -> None:
    assert many(number, noun) == told


@pytest.mark.parametrize(
    ("left", "batches", "told"),
    [
        (1, 1, "1 of 1 batch has no outcome"),
        (1, 3, "1 of 3 batches has no outcome"),
        (2, 3, "2 of 3 batches have no outcome"),
    ],
)
def test_batches_without_an_outcome_are_told_in_a_sentence(
    left: int, batches: int, told: str
) -> None:
    assert without_outcome(left, batches) == told
