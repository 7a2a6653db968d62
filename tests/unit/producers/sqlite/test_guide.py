"""Promises of ``docs/embedded-queue.md`` that no other test covers, at their limits."""

from __future__ import annotations

import pytest

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import ACK
from airflow_broadway.producers.sqlite import SqliteQueue, queue


@pytest.fixture
def path(tmp_path):
    return tmp_path / "queue.db"


def test_every_commit_is_synced(path):
    with SqliteQueue(path, "q") as queue_file:
        queue_file.send([b"a"])
        with queue_file._database.open(create=False) as db:
            assert db is not None
            assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
            assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_size_limits_match_guide():
    assert queue.MAX_BODY == 999_000_000
    assert queue.MAX_RECEIVE_BYTES == 64 * 1024 * 1024


def test_free_pages_are_reused(path):
    def fill_and_empty(queue_file: SqliteQueue, generation: str) -> int:
        queue_file.send([b"x" * 10_000] * 200)
        queue_file.receive(generation, 1000)
        queue_file.settle(generation, Settlement(rest=ACK))
        queue_file.close()  # moves the log into the file
        size: int = path.stat().st_size
        return size

    queue_file = SqliteQueue(path, "q")
    first = fill_and_empty(queue_file, "g1")
    assert first > 2_000_000
    assert [fill_and_empty(queue_file, f"g{run}") for run in range(2, 6)] == pytest.approx(
        [first] * 4, rel=0.05
    )
