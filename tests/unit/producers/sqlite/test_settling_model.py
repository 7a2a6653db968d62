"""The embedded queue settled under lost answers and by two at once, counted from outside."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
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
    """Its process hears nothing of what it has committed, so many times."""

    lost = 0

    def settle(self, *given: Any, **more: Any) -> SettleReport:
        report = super().settle(*given, **more)
        if self.lost:
            self.lost -= 1
            raise ProducerUnavailable("the answer is lost")
        return report


def settled(queue: SqliteQueue, given: Settlement) -> SettleReport:
    for _ in range(10):
        try:
            return queue.settle("g", given)
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
        now = queue.settle_now("g", [Entry(each, "", by_id[each]) for each in at_once])
        rest = [each for each in staged if each not in at_once]
        seconds: list[SettleReport] = []
        heirs: list[int] = []

        def entries() -> Iterator[Entry]:
            for place, each in enumerate([*rest, ""]):
                if place == at and second and not seconds:  # the first one stalls here
                    given = Settlement(rest=RELEASE) if second == "a sweep" else plain
                    seconds.append(other.settle("g", given))
                    if second == "late":
                        clock.advance(61.0)
                    heirs.extend(
                        int(message.message_id.rpartition("-")[2])
                        for message in other.receive("heir", 100)
                    )
                if each and by_id[each] is not ACK:
                    yield Entry(each, "", by_id[each])

        def everything() -> Iterator[Entry]:
            return (Entry(each, "", ACK) for each in rest)

        settlement: dict[str, Any] = {
            "rest": ACK,
            "everything": everything,
            "expected": len(rest),
            "settled_now": now,
        }
        exceptions = [Entry(each, "", by_id[each]) for each in rest if by_id[each] is not ACK]
        plain = Settlement(entries=lambda: iter(exceptions), **settlement)
        queue.lost = lost

        report = settled(queue, Settlement(entries=entries, **settlement))

        gone = {int(each.rpartition("-")[2]) for each in ids} - rows(queue.path, "messages")
        dead = rows(queue.path, "dead")
        for place, each in enumerate(ids, 1):
            if place in gone:  # none but what was acknowledged, or set aside
                assert by_id[each].action in (Action.ACK, Action.DEAD_LETTER)
                assert (by_id[each].action is Action.DEAD_LETTER) == (place in dead)
        assert report.total + now.total == len(ids)
        assert report.acked + now.acked == len(gone) - len(dead)
        assert report.dead_lettered + now.dead_lettered == len(dead)
        if seconds:
            assert report == seconds[0]
        # What the first one comes back to is another's now, and stays so.
        assert set(heirs) <= rows(queue.path, "messages")
        assert other.settle("heir", Settlement(rest=RELEASE)).released == len(heirs)
        assert queue.settle("g", plain) == report
