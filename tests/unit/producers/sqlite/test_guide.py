"""What ``docs/embedded-queue.md`` promises and no other test shows, each at its limit."""

from __future__ import annotations

import pytest

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import ACK
from airflow_broadway.producers.sqlite import SqliteQueue, queue


@pytest.fixture
def path(tmp_path):
    return tmp_path / "queue.db"


def test_every_commit_is_synced(path):
    with SqliteQueue(path, "q") as made:
        made.send([b"a"])
        with made._database.open(create=False) as db:
            assert db is not None
            assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
            assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_size_limits_match_guide():
    assert queue.MAX_BODY == 999_000_000
    assert queue.MAX_RECEIVE_BYTES == 64 * 1024 * 1024


def test_free_pages_are_reused(path):
    def filled_and_emptied(made: SqliteQueue, generation: str) -> int:
        made.send([b"x" * 10_000] * 200)
        made.receive(generation, 1000)
        made.settle(generation, Settlement(rest=ACK))
        made.close()  # what is in the log moves into the file
        return path.stat().st_size

    made = SqliteQueue(path, "q")
    first = filled_and_emptied(made, "g1")
    assert first > 2_000_000
    assert [filled_and_emptied(made, f"g{run}") for run in range(2, 6)] == pytest.approx(
        [first] * 4, rel=0.05
    )
