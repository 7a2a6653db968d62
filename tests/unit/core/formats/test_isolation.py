"""When a batch is split, and a message may be blamed for the deaths of processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from airflow_broadway.core.formats.deaths import Deaths
from airflow_broadway.core.formats.isolation import MOST_PARTS, OnRecord, Step, next_step
from airflow_broadway.core.formats.plan import PlannedBatch
from tests.unit.planned import planned_batch

Counted = dict[str, int]


class Died:
    """The number of tries that died of each batch, by id."""

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
    return planned_batch(batch_id, sources={"g": 1}, part=[[0, 0], [0, 0]])


def whole(batch_id: str, size: int) -> PlannedBatch:
    return replace(single(batch_id), size=size, part=None)


def step(died: Died, *batches: PlannedBatch, **options: Any) -> Step:
    """The next step; the defaults are two messages, and that some other was handled."""
    deaths = cast("Deaths", died)
    options = {"max_crashes": 2, "proven": True, "suspects": False, "on_record": None, **options}
    return next_step(batches or (single("a"), single("b")), deaths, **options)


def test_proven_killer_is_set_aside():
    next_step = step(Died({"a": 3, "b": 1}, {"a": 2, "b": 1}))
    assert [batch.batch_id for batch in next_step.aside] == ["a"]


@pytest.mark.parametrize(
    ("alone", "proven"), [({}, True), ({"a": 1}, True), ({"a": 9}, False)], ids=str
)
def test_unproven_batch_is_not_blamed(alone, proven):
    next_step = step(Died({"a": 9, "b": 1}, alone), proven=proven)
    assert not next_step.aside
    assert next_step.run == ["b"]


def test_nothing_is_marked_before_a_death():
    assert step(Died()) == Step()


def test_suspects_mark_batches_from_the_start():
    next_step = step(Died(), whole("a", 9), whole("b", 9), suspects=True)
    assert (next_step.run, next_step.marked, next_step.alone) == (["a", "b"], True, False)


@pytest.mark.parametrize("count", [1, 50])
def test_deaths_of_whole_tasks_mark_but_do_not_split(count):
    next_step = step(Died(in_hand={"a": count}), whole("a", 9), whole("b", 9))
    assert next_step == Step(run=["a", "b"], marked=True, deaths=count)


def test_batch_is_split_after_its_third_death():
    assert not step(Died({"a": 2}), whole("a", 9)).split
    [(batch, parts)] = step(Died({"a": 3}), whole("a", 9)).split
    assert (batch.batch_id, parts) == ("a", 2)


@pytest.mark.parametrize(
    ("size", "portion", "parts"),
    [(100, 25, 4), (101, 25, 5), (10, 1, 10), (25, 25, None), (100_000, 1, MOST_PARTS)],
)
def test_batch_with_messages_in_hand_is_split_before_it_runs(size, portion, parts):
    on_record = {"a": OnRecord(1, portion)}
    next_step = step(Died(), whole("a", size), whole("b", 9), suspects=True, on_record=on_record)
    assert [count for _, count in next_step.split] == ([] if parts is None else [parts])


def test_part_is_not_split_again_by_the_record():
    part = replace(single("a"), size=50)
    next_step = step(Died(), part, suspects=True, on_record={"a": OnRecord(2, 1)})
    assert not next_step.split
    assert next_step.run == ["a"]


def test_batches_in_hand_wait_for_the_others():
    on_record = {"a": OnRecord(1, 25), "b": OnRecord(3, 1, 3)}
    batches = [whole("a", 9), replace(single("b"), part=None), whole("c", 9)]
    assert step(Died(), *batches, proven=False, suspects=True, on_record=on_record).aside
    on_record["b"] = OnRecord(2, 1, 2)
    first = step(Died(), *batches, suspects=True, on_record=on_record)
    assert (first.run, first.alone) == (["c"], False)
    then = step(Died(), *batches[:2], suspects=True, on_record=on_record)
    assert (then.run, then.alone) == (["a", "b"], True)


def test_parts_least_in_hand_go_first():
    parts = [replace(single(name), size=size) for name, size in [("a", 9), ("b", 5), ("c", 7)]]
    on_record = {"a": OnRecord(2, 1), "b": OnRecord(1, 25), "c": OnRecord(1, 25)}
    next_step = step(Died(), *parts, suspects=True, on_record=on_record)
    assert next_step.run == ["c", "b", "a"]


@pytest.mark.parametrize(("here", "before"), [(2, 0), (0, 2), (1, 1)])
def test_message_alone_in_hand_too_often_is_set_aside(here, before):
    def aside(here):
        died = Died(in_hand={"a": here}, in_hand_alone={"a": here})
        on_record = {"a": OnRecord(before, 1, before)}
        next_step = step(died, suspects=True, on_record=on_record)
        return [batch.batch_id for batch in next_step.aside]

    assert aside(here) == []
    assert aside(here + 1) == ["a"]
