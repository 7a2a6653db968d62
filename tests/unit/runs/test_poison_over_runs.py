"""Batches that processes die of, run after run, of a task that is never retried."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import BatchInfo
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.deaths import (
    TRIES,
    WORK,
    Deaths,
    interruptions_of,
    mark_begun,
    say_ended,
    say_started,
)
from airflow_broadway.core.formats.isolation import Step
from airflow_broadway.core.formats.ownership import begin_try
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.runs.plans import OpenPlans
from airflow_broadway.runs.poison.child_process import ChildProcess
from airflow_broadway.runs.tasks import BatchTask
from airflow_broadway.staging.crash_records import load_crash_history
from airflow_broadway.staging.planner import plan_batches
from tests.deaths import WAYS, die
from tests.unit.runs.steps import Point, Run, Sums, dies


class Deadly(Sums):
    """Ends the process that handles one of ``context["deadly"]``, or its whole group.

    A group stands for all processes of a container: none is left to go on.
    """

    name = "Sums"

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        handled = super().handle_batch(batcher, messages, batch_info, context)
        if context.get("killed"):
            die("group")
        if any(message.data in context["deadly"] for message in messages):
            die("group" if context["whole"] else context.get("way", "exit"))
        return handled


class Runs:
    """Runs of one Dag, one after another; the task of their batcher is tried once."""

    def __init__(
        self,
        folder: Path,
        deadly: Sequence[int],
        numbers: Sequence[int],
        *,
        crashes: int,
        whole: bool = False,
    ) -> None:
        self.folder, self.crashes = folder, crashes
        self.context = {"deadly": deadly, "whole": whole}
        self.count = 0
        #: Whether processors handle suspects in a child, which takes a second or two.
        self.isolates = False
        self.last = self._next()
        self.last.send(numbers)

    def _next(self) -> Run:
        before = [f"manual__{number}" for number in range(1, self.count + 1)]
        self.count += 1
        run_id, context = f"manual__{self.count}", self.context
        run = Run(self.folder, run_id, pipeline=Deadly, finished=before, context=context)
        object.__setattr__(run.pipeline.producer, "max_crashes", self.crashes)
        return run

    def receive_and_handle(self) -> str:
        """All of a run but its end; returns how the task's process ended."""
        run = self.last = self._next()
        reference = run.process(isolates=self.isolates)
        if not reference["batchers"]:
            return ""
        plan = run.plan(reference)
        task = replace(run.task(), task_id="batch.default", map_index=-1)
        batch_task = BatchTask(run.staged, run.pipeline, task, run.ports, batcher="default")

        def work() -> None:
            os.setpgid(0, 0)
            batch_task.handle(plan)

        return ChildProcess(work).wait()

    def one(self) -> dict[str, Any]:
        """A whole run; its report."""
        self.receive_and_handle()
        return self.last.ack()

    def until_dead(self, numbers: Sequence[int]) -> int:
        """Returns the number of runs until these are dead letters, and all else is done."""
        for number in range(1, 100):
            assert self.one()["balanced"]
            if self.last.depth() == (0, 0, 0, len(numbers)):
                assert self.last.dead() == sorted(numbers)
                return number
        raise AssertionError(f"after 99 runs there are {self.last.depth()}")


#: Numbers that no callback fails.
NUMBERS = [n for n in range(1, 1000) if n % 7 and n % 5]


def test_second_run_finds_poison_without_retries(tmp_path):
    # Given a message that kills its process, and further messages with every run
    runs = Runs(tmp_path, [11], NUMBERS[:35], crashes=3)

    # When a run ends at it
    assert runs.receive_and_handle() == "exit code 9"
    runs.last.ack()
    runs.last.send(NUMBERS[35:50])

    # Then the second handles its batches in processes that may die, and finds it
    report = runs.one()
    assert report["isolation"]["batches"][0]["crashed"] == 1
    assert runs.last.dead() == [11]
    assert report["totals"]["released"] == 0
    assert runs.last.depth() == (0, 0, 0, 1)
    assert {call.number for call in runs.last.calls()} == set(NUMBERS[:50])
    assert not runs.last.unmarked()


@pytest.mark.parametrize("way", WAYS)
def test_poison_among_a_thousand_is_found_without_retries(tmp_path, way):
    numbers = [n for n in range(1, 10_000) if n % 7 and n % 5][:1_000]
    runs = Runs(tmp_path, [737], numbers, crashes=5)
    runs.context["way"] = way
    assert runs.until_dead([737]) == 2
    assert {call.number for call in runs.last.calls()} == set(numbers)


def test_runs_narrow_down_poison_that_kills_the_container(tmp_path):
    # Given messages that kill every process of a run
    runs = Runs(tmp_path, [11, 501], [*NUMBERS[:40], 501], crashes=2, whole=True)

    # Then messages in hand are handled in ever smaller portions, and the others too
    assert runs.until_dead([11, 501]) <= 20
    assert {call.number for call in runs.last.calls()} == {*NUMBERS[:40], 501}


def test_fifty_outside_kills_of_runs_blame_no_message(tmp_path):
    # Given good messages, and runs whose batch task is killed at its first batch
    runs = Runs(tmp_path, [], NUMBERS[:16], crashes=5)
    for _ in range(50):
        runs.context["killed"] = True
        assert runs.receive_and_handle() == "killed by SIGKILL"
        runs.last.ack()
        assert runs.last.dead() == []

    # Then the first undisturbed run handles them all
    del runs.context["killed"]
    assert runs.one()["totals"]["acked"] == 16
    assert runs.last.depth() == (0, 0, 0, 0)


def test_outside_kills_of_runs_do_not_blame_the_only_message(tmp_path):
    runs = Runs(tmp_path, [], [1], crashes=5)
    runs.context["killed"] = True
    for _ in range(5):
        assert runs.receive_and_handle() == "killed by SIGKILL"
        runs.last.ack()
    del runs.context["killed"]
    assert runs.one()["totals"]["acked"] == 1
    assert runs.last.dead() == []


@pytest.mark.parametrize(
    "point",
    [
        Point("airflow_broadway.runs.settle.record_crash", "after"),
        Point("airflow_broadway.producers.sqlite.queue:SqliteQueue.settle", "after"),
        Point("airflow_broadway.runs.settle.record_crash", "before"),
    ],
    ids=str,
)
def test_kill_while_recording_a_crash_loses_nothing(tmp_path, point):
    # Given a run whose batches died, and whose settling is killed on its way
    runs = Runs(tmp_path, [11], NUMBERS[:25], crashes=3)
    runs.receive_and_handle()
    dies(runs.last.ack, point)

    # When another settles it, then the crash is on record, and the next runs find it
    runs.last.ack()
    assert runs.until_dead([11]) <= 3
    assert {call.number for call in runs.last.calls()} == set(NUMBERS[:25])


def test_crash_recorded_repeatedly_blames_no_neighbour(tmp_path):
    # Given a run whose settling is tried many times, as while a broker is out of reach
    runs = Runs(tmp_path, [11], NUMBERS[:25], crashes=2)
    runs.receive_and_handle()
    for _ in range(4):
        dies(runs.last.ack, Point("airflow_broadway.runs.settle.record_crash"))

    # Then the next runs dead-letter the killer, and handle the rest
    assert runs.until_dead([11]) <= 5
    assert {call.number for call in runs.last.calls()} == set(NUMBERS[:25])


def test_requeued_poison_message_is_handled_again(tmp_path):
    # Given a message that a run has dead-lettered, since whole tasks died of it
    runs = Runs(tmp_path, [11], [11], crashes=1, whole=True)
    runs.isolates = True
    runs.until_dead([11])
    with runs.last.queue() as queue:
        [letter] = queue.dead_letters()
        assert letter.stage == "process"

        # When it is requeued after a fix
        assert queue.requeue().count == 1
    runs.context["deadly"] = ()

    # Then it is handled like any other
    assert runs.one()["totals"]["acked"] == 1
    assert runs.last.depth() == (0, 0, 0, 0)


def test_sweep_records_the_crash_of_a_dead_run(tmp_path):
    # Given runs whose sensors never looked, as where the whole host died
    runs = Runs(tmp_path, [11], NUMBERS[:25], crashes=3)
    runs.receive_and_handle()

    # Then the next run's sweep records the crash, and that run finds the message
    assert runs.one()["isolation"]["batches"][0]["crashed"] == 1
    assert runs.last.dead() == [11]


def test_batcher_ending_while_process_is_cleared_is_no_crash(tmp_path):
    # Given a batcher at work, of a run whose process task is cleared
    run = Run(tmp_path, numbers=NUMBERS[:5])
    plan = run.plan(run.process())
    document = json.dumps({"version": 1, "plans": [plan.path], "marked": False})
    begin_try(run.staged.files, "batch.default", lambda _: document, TRIES)

    # When it is retried before the batcher has recorded its end
    run.process(try_number=2)

    # Then no crash is recorded
    assert not list(tmp_path.rglob("interruptions/**/*"))
    assert not list(tmp_path.rglob("_crashes/*"))


# -- what was in hand ------------------------------------------------------------------------------
@pytest.fixture
def open_run(tmp_path):
    """A run with three batches, of which none was handled."""
    run = Run(tmp_path, numbers=NUMBERS[:30])
    plan = run.plan(run.process())
    return run, OpenPlans(run.staged, [plan.path])


def in_hand(run: Run, plans: OpenPlans) -> list[list[int]]:
    """Returns the places of the batches that were in hand at each interruption."""
    ids = [batch.batch_id for _, batch in plans.open_batches()]
    interruptions = interruptions_of(run.staged.files, plans.heads[0].path)
    return [sorted(ids.index(batch_id) for batch_id in batch_ids) for batch_ids in interruptions]


def test_begun_batches_of_an_application_were_in_hand(open_run):
    run, plans = open_run
    files = run.staged.files
    ids = [batch.batch_id for _, batch in plans.open_batches()]
    step = Step(run=ids, marked=True)
    _, work = plans.write_work("spark", {}, RunInfo(), step)
    assert in_hand(run, plans) == []  # it never began
    say_started(files, "spark", work.try_number, WORK)
    mark_begun(files, "spark", work.try_number, WORK, ids[1])
    assert in_hand(run, plans) == [[1]]

    _, work = plans.write_work("spark", {}, RunInfo(), Step())
    say_started(files, "spark", work.try_number, WORK)
    assert in_hand(run, plans) == [[1], []]  # it is not known what it had begun


def test_batches_in_hand_are_recorded_once_for_all_plans(open_run):
    run, plans = open_run
    files = run.staged.files
    [_, (_, done), (_, open_one)] = plans.open_batches()
    other = "batches/other/inputs/1"
    document = {"version": 1, "marked": True, "only": None, "plans": [plans.heads[0].path, other]}
    number, _ = begin_try(files, "spark", lambda _: json.dumps(document), WORK)
    say_started(files, "spark", number, WORK)
    files.create(paths.outcome(other, done.batch_id), "{}")
    for batch in (done, open_one):
        mark_begun(files, "spark", number, WORK, batch.batch_id)

    # In any order of plans, and with later outcomes
    assert interruptions_of(files, plans.heads[0].path) == [[open_one.batch_id]]
    files.create(paths.outcome(other, open_one.batch_id), "{}")
    assert interruptions_of(files, other) == [[open_one.batch_id]]


def test_orderly_try_and_other_plans_are_no_interruption(open_run):
    run, plans = open_run
    files = run.staged.files
    _, work = plans.write_work("spark", {}, RunInfo(), Step())
    say_started(files, "spark", work.try_number, WORK)
    say_ended(files, "spark", work.try_number, WORK)
    document = {"version": 1, "marked": False, "only": None, "plans": ["batches/default/others/1"]}
    begin_try(files, "batch.default", lambda _: json.dumps(document), TRIES)
    assert in_hand(run, plans) == []


def test_death_under_a_living_parent_is_no_recorded_crash(open_run):
    run, plans = open_run
    files = run.staged.files
    _, work = plans.write_work("spark", {}, RunInfo(), Step(), "parent")
    say_started(files, "spark", work.try_number, WORK)
    deaths = Deaths(files, "spark", WORK)
    deaths.look(parent="another")
    assert deaths.count == 0
    deaths.look(parent="parent")
    assert deaths.count == 1
    assert in_hand(run, plans) == []


@pytest.mark.parametrize(("places", "alone"), [([0, 1], []), ([1], [1]), ([], [])], ids=str)
def test_messages_of_several_generations_are_not_alone_in_hand(tmp_path, places, alone):
    # Given two generations with batches of one message
    run = Run(tmp_path, batchers={"default": {"batch_size": 1}})
    generations = []
    for number in (1, 2):
        run.send([number])
        generations.append(run.process(index=number)["generation"])
    plan = plan_batches(run.staged, run.pipeline, "default", generations, try_label="1")
    ids = [batch.batch_id for _, batch in OpenPlans(run.staged, [plan.path]).open_batches()]
    document = {"version": 1, "marked": True, "only": None, "plans": [plan.path]}
    number, _ = begin_try(run.staged.files, "batch.default", lambda _: json.dumps(document), TRIES)
    for place in places:
        mark_begun(run.staged.files, "batch.default", number, TRIES, ids[place])

    # When the run is settled
    run.ack()

    # Then a crash names its generation's messages, alone only if no other was in hand
    history = load_crash_history(run.staged.store, "Sums", run.staged.clock.now())
    assert history.crashes == 2
    assert len(history.in_hand) == len(places)
    assert set(history.in_hand.values()) <= {1}
    assert len(history.alone) == len(alone)


def test_damaged_file_costs_only_the_record(tmp_path):
    runs = Runs(tmp_path, [11], NUMBERS[:25], crashes=3)
    runs.receive_and_handle()
    damaged = [*tmp_path.glob("staging/**/batches/**/data-*.parquet")]
    assert damaged
    for path in damaged:
        path.write_bytes(b"damaged")
    assert runs.last.ack()["totals"]["released"] > 0
