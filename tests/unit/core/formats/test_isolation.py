"""When a batch is split, and a message may be blamed for the deaths of processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import cast

import pytest

from airflow_broadway.core.formats.deaths import Deaths
from airflow_broadway.core.formats.isolation import MOST_PARTS, OnRecord, Step, next_step
from airflow_broadway.core.formats.plan import PlannedBatch

Counted = dict[str, int]


class Died:
    """So many tries died of each batch: by id."""

    def __init__(
        self,
        deaths: Counted | None = None,
        alone: Counted | None = None,
        *,
        in_hand: Counted | None = None,
        in_hand_alone: Counted | None = None,
    ) -> None:
        self._of = Counter(deaths)
        self.alone = Counter(alone)
        self.interrupted = Counter(in_hand)
        self.interrupted_alone = Counter(in_hand_alone)
        self.count, self.interruptions = self._of.total(), self.interrupted.total()

    def of(self, batch: PlannedBatch) -> int:
        return self._of[batch.batch_id]


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


def whole(batch_id: str, size: int) -> PlannedBatch:
    return replace(single(batch_id), size=size, part=None)


def step(
    died: Died,
    *batches: PlannedBatch,
    proven: bool = True,
    suspects: bool = False,
    on_record: dict[str, OnRecord] | None = None,
) -> Step:
    return next_step(
        batches or (single("a"), single("b")),
        cast("Deaths", died),
        max_crashes=2,
        proven=proven,
        suspects=suspects,
        on_record=on_record,
    )


def test_a_message_that_killed_its_processes_alone_is_set_aside_once_another_was_handled() -> None:
    found = step(Died({"a": 3, "b": 1}, {"a": 2, "b": 1}))
    assert [item.batch_id for item in found.aside] == ["a"]


@pytest.mark.parametrize(
    ("alone", "proven"), [({}, True), ({"a": 1}, True), ({"a": 9}, False)], ids=str
)
def test_nothing_is_blamed_among_others_or_where_everything_dies(
    alone: dict[str, int], proven: bool
) -> None:
    found = step(Died({"a": 9, "b": 1}, alone), proven=proven)
    assert not found.aside
    assert found.run == ["b"]


def test_nothing_is_marked_before_something_died() -> None:
    assert step(Died()) == Step()


def test_batches_are_marked_from_the_first_on_where_there_are_suspects() -> None:
    found = step(Died(), whole("a", 9), whole("b", 9), suspects=True)
    assert (found.run, found.marked, found.alone) == (["a", "b"], True, False)


@pytest.mark.parametrize("count", [1, 50])
def test_deaths_of_whole_tasks_split_no_batch_and_only_mark(count: int) -> None:
    found = step(Died(in_hand={"a": count}), whole("a", 9), whole("b", 9))
    assert found == Step(run=["a", "b"], marked=True)


def test_a_batch_is_split_after_its_third_death() -> None:
    assert not step(Died({"a": 2}), whole("a", 9)).split
    [(batch, parts)] = step(Died({"a": 3}), whole("a", 9)).split
    assert (batch.batch_id, parts) == ("a", 2)


@pytest.mark.parametrize(
    ("size", "portion", "parts"),
    [(100, 25, 4), (101, 25, 5), (10, 1, 10), (25, 25, None), (100_000, 1, MOST_PARTS)],
)
def test_a_batch_with_messages_that_were_in_hand_is_split_before_it_runs(
    size: int, portion: int, parts: int | None
) -> None:
    on_record = {"a": OnRecord(1, portion)}
    found = step(Died(), whole("a", size), whole("b", 9), suspects=True, on_record=on_record)
    assert [count for _, count in found.split] == ([] if parts is None else [parts])


def test_a_part_is_not_split_for_what_is_on_record() -> None:
    part = replace(single("a"), size=50)
    found = step(Died(), part, suspects=True, on_record={"a": OnRecord(2, 1)})
    assert not found.split
    assert found.run == ["a"]


def test_batches_that_were_in_hand_wait_for_the_others() -> None:
    on_record = {"a": OnRecord(1, 25), "b": OnRecord(3, 1, 3)}
    batches = [whole("a", 9), replace(single("b"), part=None), whole("c", 9)]
    assert step(Died(), *batches, proven=False, suspects=True, on_record=on_record).aside
    on_record["b"] = OnRecord(2, 1, 2)
    first = step(Died(), *batches, suspects=True, on_record=on_record)
    assert (first.run, first.alone) == (["c"], False)
    then = step(Died(), *batches[:2], suspects=True, on_record=on_record)
    assert (then.run, then.alone) == (["a", "b"], True)


def test_batches_behind_a_suspect_of_their_partition_wait_for_it() -> None:
    places = {"suspect": 1, "behind": 1, "beside": 2, "anywhere": None}
    batches = [replace(whole(name, 9), partition=place) for name, place in places.items()]
    on_record = {"suspect": OnRecord(1, 25)}
    assert step(Died(), *batches, suspects=True, on_record=on_record).run == ["beside", "anywhere"]


def test_parts_that_were_in_hand_least_go_first() -> None:
    parts = [replace(single(name), size=size) for name, size in [("a", 9), ("b", 5), ("c", 7)]]
    on_record = {"a": OnRecord(2, 1), "b": OnRecord(1, 25), "c": OnRecord(1, 25)}
    assert step(Died(), *parts, suspects=True, on_record=on_record).run == ["c", "b", "a"]


@pytest.mark.parametrize(("here", "before"), [(2, 0), (0, 2), (1, 1)])
def test_a_message_is_set_aside_after_more_than_max_crashes_whole_tasks_died_at_it_alone(
    here: int, before: int
) -> None:
    def aside(here: int) -> list[str]:
        died = Died(in_hand={"a": here}, in_hand_alone={"a": here})
        found = step(died, suspects=True, on_record={"a": OnRecord(before, 1, before)})
        return [item.batch_id for item in found.aside]

    assert aside(here) == []
    assert aside(here + 1) == ["a"]
