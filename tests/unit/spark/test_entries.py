"""Entries of a batch's exceptions, without a session: rows are plain mappings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.model.message import Message, Status
from airflow_broadway.spark import entries
from airflow_broadway.spark.entries import Counts, Judge
from airflow_broadway.spark.unsuccessful import MISSING, Unsuccessful
from tests.unit.spark.pipelines import Counting, Mending


def row(name: str, **more: Any) -> dict[str, Any]:
    return {
        "message_id": name,
        "data": "1",
        "batch_key": "k",
        "metadata": {},
        "attempt": 2,
        "redelivered": False,
        "received_at": None,
        "position": 0,
        "source": 0,
        "_receipt": f"receipt of {name}",
        "_payload": bytearray(b"body"),
        "_properties": "{}",
        "_on_success": None,
        "_on_failure": None,
        "_acked": False,
        **more,
    }


def judged(
    monkeypatch: pytest.MonkeyPatch, *exceptions: tuple[str, Status], handle_failed: Any = None
) -> list[Entry]:
    pipeline = Counting()
    frames: Any = SimpleNamespace(
        plan=SimpleNamespace(batcher="default", as_bytes=False), schema=None
    )
    judge = Judge(pipeline, None, frames)
    if handle_failed is not None:
        monkeypatch.setattr(entries, "run_handle_failed", handle_failed)
    found = [Unsuccessful(row(name), status) for name, status in exceptions]
    monkeypatch.setattr(entries, "unsuccessful", lambda *_, **__: iter(found))
    some: Any = SimpleNamespace(sources={"g": 1})
    return [line.entry for line in judge.entries(some, some, some, Counts())]


def test_a_message_without_outcome_goes_back_with_the_body_it_came_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Some brokers give back by publishing again: without the body nothing could be published.
    [entry] = judged(monkeypatch, ("m", MISSING))
    assert (entry.verdict.action.value, entry.payload, entry.properties) == (
        "release",
        b"body",
        "{}",
    )
    assert (entry.receipt, entry.attempt) == ("receipt of m", 2)


def test_what_handle_failed_drops_goes_back_with_the_body_it_came_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drops(pipeline: Any, messages: list[Message], *_: Any) -> list[Message]:
        return messages[1:]

    kept, dropped = judged(
        monkeypatch,
        ("a", Status("failed", "no")),
        ("b", Status("failed", "no")),
        handle_failed=drops,
    )
    assert (kept.message_id, kept.verdict.action.value, kept.payload) == ("b", "retry", b"body")
    assert (dropped.message_id, dropped.verdict.action.value) == ("a", "release")
    assert (dropped.payload, dropped.properties) == (b"body", "{}")


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("default", "default", "default"),  # a key that is text stands in its column as itself
        ("7", "7", "7"),
        ("7", 7, 7),
        ('["a",[1]]', ["a", [1]], ("a", (1,))),
        ("null", None, None),
        ("EWR", None, "EWR"),  # a batch of several keys has none itself
        ('["a",1]', None, '["a",1]'),
    ],
)
def test_handle_failed_gets_the_key_of_the_batch(text: str, key: Any, expected: Any) -> None:
    batch: Any = SimpleNamespace(batch_key=key)
    assert entries._batch_key(text, batch) == expected


def test_what_was_settled_before_its_batch_failed_reaches_handle_failed_and_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames: Any = SimpleNamespace(
        plan=SimpleNamespace(batcher="default", as_bytes=False), schema=None
    )
    judge = Judge(Mending(), None, frames)
    now = {"received_at": 1_767_225_600_000_000}
    failed = Status("failed", "no")
    found = [
        Unsuccessful(row("a", _acked=True, **now), failed),
        Unsuccessful(row("b", **now), failed),
        Unsuccessful(row("c", _acked=True, **now), MISSING),
    ]
    monkeypatch.setattr(entries, "unsuccessful", lambda *_, **__: iter(found))
    some: Any = SimpleNamespace(sources={"g": 1}, batch_key="k")
    counts = Counts()
    Mending.seen.clear()
    lines = list(judge.entries(some, some, some, counts))
    assert [[each.message_id for each in call] for call in Mending.seen] == [["a", "b"]]
    assert [line.entry.message_id for line in lines] == ["b"]
    assert (counts.failed, counts.missing) == (2, 0)
    Mending.seen.clear()
