"""When a message may be blamed for the deaths of processes."""

from __future__ import annotations

from typing import cast

import pytest

from airflow_broadway.core.formats.deaths import Deaths
from airflow_broadway.core.formats.isolation import Step, next_step
from airflow_broadway.core.formats.plan import PlannedBatch


class Died:
    """So many processes died of each batch; of those that are named, with nothing else."""

    def __init__(self, counts: dict[str, int], alone: set[str]) -> None:
        self.count = max(counts.values())
        self._counts, self._alone = counts, alone

    def of(self, batch: PlannedBatch) -> int:
        return self._counts.get(batch.batch_id, 0)

    def alone(self, batch: PlannedBatch) -> int:
        return int(batch.batch_id in self._alone)


def single(batch_id: str) -> PlannedBatch:
    """A part with one message."""
    return PlannedBatch(
        batch_id=batch_id,
        rows=[[0, 0]],
        files=[0],
        batch_key="default",
        keys=1,
        partition=None,
        size=1,
        bytes=1,
        trigger="size",
        redelivered=0,
        sources={"g": 1},
        part=[[0, 0], [0, 0]],
    )


def step(counts: dict[str, int], alone: set[str], *, proven: bool) -> Step:
    deaths = cast("Deaths", Died(counts, alone))
    return next_step([single("a"), single("b")], deaths, max_crashes=2, proven=proven)


def test_who_killed_its_process_alone_is_set_aside_once_something_else_was_handled() -> None:
    found = step({"a": 2, "b": 1}, {"a", "b"}, proven=True)
    assert [each.batch_id for each in found.aside] == ["a"]


@pytest.mark.parametrize(("alone", "proven"), [(set(), True), ({"a"}, False)])
def test_nothing_is_blamed_among_others_or_where_everything_dies(
    alone: set[str], proven: bool
) -> None:
    found = step({"a": 9, "b": 1}, alone, proven=proven)
    assert not found.aside
    assert found.run == ["b"]
