"""Receipts of one generation, for a message whose receipt the broker refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.producers.engine.receipts import Receipts, ReceiptsFolder
from tests.unit.producers.engine.adapters import EmptyBroker


def opened(folder: Path) -> ReceiptsFolder:
    return ReceiptsFolder(EmptyBroker(ProducerEnv(shared=f"file://{folder}")))


def take(receipts: Receipts, handles: dict[str, str]) -> None:
    receipts.hold(handles, {}, 0.0, 60.0)


def test_redelivered_message_is_leased_by_new_receipt(tmp_path):
    # Given two messages, one of which the broker holds no longer
    receipts = opened(tmp_path).open("g")
    take(receipts, {"a": "a-1", "b": "b-1"})
    receipts.lose(["a"])
    assert (receipts.lost, receipts.held(), receipts.due(60.0)) == ({"a"}, ["b"], ["b"])

    # When the same generation receives it again
    take(receipts, {"a": "a-2"})

    # Then it is renewed and settled by that; other processes know it, too
    opened(tmp_path).close("g")
    other = opened(tmp_path).of("g")
    assert other is not receipts
    for item in (receipts, other):
        assert (item.lost, item.held(), item.due(60.0)) == (set(), ["a", "b"], ["a", "b"])
        assert item.handles["a"] == "a-2"

    # and it may be lost again
    other.lose(["a"])
    assert opened(tmp_path).of("g").lost == {"a"}


@pytest.mark.parametrize("text", ["{}", "[]", "torn"])
def test_messages_of_damaged_receipts_are_left_to_their_lease(tmp_path, text):
    folder = opened(tmp_path)
    take(folder.open("g"), {"a": "a-1"})
    folder.close("g")
    [file] = tmp_path.rglob("receipts-*.json")
    file.write_text(text)

    assert opened(tmp_path).of("g").held() == []
