"""Settlement of the embedded queue under lost answers and concurrent settlers."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.testing.clock import ManualClock
from tests.unit.producers.verdicts import VERDICTS


class Losing(SqliteQueue):
    """Loses the answer of the next settlements, which are committed."""

    lost = 0

    def settle(self, *args: Any, **options: Any) -> SettleReport:
        report = super().settle(*args, **options)
        if self.lost:
            self.lost -= 1
            raise ProducerUnavailable("the answer is lost")
        return report


def settled(queue: SqliteQueue, request: Settlement) -> SettleReport:
    for _ in range(10):
        try:
            return queue.settle("g", request)
        except ProducerUnavailable:
            continue
    raise AssertionError("settling never ended")


def rows(path: str, table: str) -> set[int]:
    with closing(sqlite3.connect(path)) as db:
        return {row for (row,) in db.execute(f"SELECT id FROM {table}")}


@settings(max_examples=80, deadline=None)
@given(
    verdicts=st.lists(st.sampled_from(VERDICTS), min_size=1, max_size=20),
    early=st.integers(0, 5),
    unstaged=st.integers(0, 3),
    lost=st.integers(0, 3),
    second=st.sampled_from(["", "the same", "a sweep", "late"]),
    at=st.integers(0, 8),
)
def test_report_matches_file(verdicts, early, unstaged, lost, second, at):
    clock = ManualClock()
    with (
        tempfile.TemporaryDirectory() as folder,
        Losing(Path(folder) / "q.db", "q", clock=clock) as queue,
        SqliteQueue(Path(folder) / "q.db", "q", clock=clock) as other,
    ):
        ids = queue.send([b"%d" % number for number in range(len(verdicts) + unstaged)])
        assert len(queue.receive("g", 100, seconds=60.0)) == len(ids)
        by_id = dict(zip(ids, verdicts, strict=False))
        staged = list(by_id)
        at_once = staged[: min(early, len(staged))]
        now = queue.settle_now("g", [Entry(key, "", by_id[key]) for key in at_once])
        rest = [key for key in staged if key not in at_once]
        seconds: list[SettleReport] = []
        heirs: list[int] = []

        def entries() -> Iterator[Entry]:
            for place, key in enumerate([*rest, ""]):
                if place == at and second and not seconds:  # the first stalls here
                    request = Settlement(rest=RELEASE) if second == "a sweep" else plain
                    seconds.append(other.settle("g", request))
                    if second == "late":
                        clock.advance(61.0)
                    heirs.extend(
                        int(message.message_id.rpartition("-")[2])
                        for message in other.receive("heir", 100)
                    )
                if key and by_id[key] is not ACK:
                    yield Entry(key, "", by_id[key])

        settlement = partial(
            Settlement,
            rest=ACK,
            everything=lambda: (Entry(key, "", ACK) for key in rest),
            expected=len(rest),
            settled_now=now,
        )
        exceptions = [Entry(key, "", by_id[key]) for key in rest if by_id[key] is not ACK]
        plain = settlement(entries=lambda: iter(exceptions))
        queue.lost = lost

        report = settled(queue, settlement(entries=entries))

        gone = {int(key.rpartition("-")[2]) for key in ids} - rows(queue.path, "messages")
        dead = rows(queue.path, "dead")
        for place, key in enumerate(ids, 1):
            if place in gone:  # acknowledged or dead-lettered
                assert by_id[key].action in (Action.ACK, Action.DEAD_LETTER)
                assert (by_id[key].action is Action.DEAD_LETTER) == (place in dead)
        assert report.total + now.total == len(ids)
        assert report.acked + now.acked == len(gone) - len(dead)
        assert report.dead_lettered + now.dead_lettered == len(dead)
        if seconds:
            assert report == seconds[0]
        # The messages now leased by another remain so.
        assert set(heirs) <= rows(queue.path, "messages")
        assert other.settle("heir", Settlement(rest=RELEASE)).released == len(heirs)
        assert queue.settle("g", plain) == report
