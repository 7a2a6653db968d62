"""Batches that processes die of, run after run, of a task that is never retried."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import BatchInfo
from airflow_broadway.core.formats.deaths import (
    TRIES,
    WORK,
    died_of,
    mark_begun,
    say_ended,
    say_started,
)
from airflow_broadway.core.formats.isolation import Step
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.ownership import begin_try
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.runs.plans import OpenPlans
from airflow_broadway.runs.poison.apart import Apart
from airflow_broadway.runs.tasks import BatchTask
from airflow_broadway.staging.planner import plan_batches
from tests.unit.runs.steps import Point, Run, Sums, dies


class Deadly(Sums):
    """The process dies that handles one of ``context["deadly"]``, and its group where that is so.

    A group is all processes of a container: there is nobody left to go on.
    """

    name = "Sums"

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        handled = super().handle_batch(batcher, messages, batch_info, context)
        if any(each.data in context["deadly"] for each in messages):
            if context["whole"]:
                os.killpg(0, signal.SIGKILL)
            os._exit(9)
        return handled


class Runs:
    """Runs of one Dag, one after another; the task of their batcher is tried once."""

    def __init__(
        self, folder: Path, deadly: Sequence[int], *, crashes: int, whole: bool = False
    ) -> None:
        self.folder, self.crashes = folder, crashes
        self.context = {"deadly": deadly, "whole": whole}
        self.count = 0
        self.last = self._next()

    def _next(self) -> Run:
        before = [f"manual__{number}" for number in range(1, self.count + 1)]
        self.count += 1
        run = Run(
            self.folder,
            f"manual__{self.count}",
            pipeline=Deadly,
            finished=before,
            context=self.context,
        )
        object.__setattr__(run.pipeline.producer, "max_crashes", self.crashes)
        return run

    def receive_and_handle(self) -> str:
        """All of a run but its end; how the task's process ended."""
        run = self.last = self._next()
        reference = run.process()
        if not reference["batchers"]:
            return ""
        plan = plan_batches(
            run.staged, run.pipeline, "default", [reference["generation"]], try_label="1"
        )
        task = replace(run.task(), task_id="batch.default", map_index=-1)
        made = BatchTask(run.staged, run.pipeline, task, run.ports, batcher="default")

        def work() -> None:
            os.setpgid(0, 0)
            made.handle(plan)

        return Apart(work).wait()

    def one(self) -> dict[str, Any]:
        """A whole run; its report."""
        self.receive_and_handle()
        return self.last.ack()

    def until_dead(self, numbers: Sequence[int]) -> int:
        """How many runs it takes until these are dead letters, and all else is done."""
        for number in range(1, 100):
            assert self.one()["balanced"]
            if self.last.depth() == (0, 0, 0, len(numbers)):
                assert self.last.dead() == sorted(numbers)
                return number
        raise AssertionError(f"after 99 runs there are {self.last.depth()}")


#: Those that no callback fails.
NUMBERS = [n for n in range(1, 1000) if n % 7 and n % 5]


def test_a_task_that_is_never_retried_finds_what_kills_it_in_the_third_run(tmp_path: Path) -> None:
    # Given a message that kills its process, among others, and with each run some more
    runs = Runs(tmp_path, deadly=[11], crashes=3)
    runs.last.send(NUMBERS[:35])

    # When there are two runs, both end at it; what was in their other batches may be done
    assert runs.receive_and_handle() == "exit code 9"
    runs.last.ack()
    runs.last.send(NUMBERS[35:50])
    assert runs.receive_and_handle() == "exit code 9"
    runs.last.ack()
    runs.last.send(NUMBERS[50:60])

    # Then the third takes what may have killed them, and nothing else, and finds it
    report = runs.one()
    assert report["isolation"]["batches"][0]["crashed"] == 1
    assert runs.last.dead() == [11]
    assert report["totals"]["released"] == 0
    runs.one()
    assert runs.last.depth() == (0, 0, 0, 1)
    handled = Counter(call.number for call in runs.last.calls())
    assert set(handled) == set(NUMBERS[:60])
    assert not runs.last.unmarked()


def test_where_each_death_ends_the_whole_container_runs_narrow_it_down(tmp_path: Path) -> None:
    # Given a message of which nothing of a run is left: no fork goes on
    runs = Runs(tmp_path, deadly=[11, 501], crashes=2, whole=True)
    runs.last.send([*NUMBERS[:40], 501])

    # Then portions of 10 and of 1 find it all the same, and the others are handled
    count = runs.until_dead([11, 501])
    assert count <= 2 * (2 + 4 + 10 + 1)
    handled = {call.number for call in runs.last.calls()}
    assert handled == {*NUMBERS[:40], 501}


@pytest.mark.parametrize(
    "point",
    [
        Point("airflow_broadway.producers.kit.suspects:Deaths.count", "after"),
        Point("airflow_broadway.producers.sqlite.queue:SqliteQueue.settle", "after"),
        Point("airflow_broadway.producers.kit.suspects:Deaths.count", "before"),
    ],
    ids=str,
)
def test_a_kill_of_who_counts_loses_nothing(tmp_path: Path, point: Point) -> None:
    # Given a run whose batches died, and whose settling is killed on its way
    runs = Runs(tmp_path, deadly=[11], crashes=3)
    runs.last.send(NUMBERS[:25])
    runs.receive_and_handle()
    dies(runs.last.ack, point)

    # When another settles it, then deaths are counted, and the next runs find it
    runs.last.ack()
    assert runs.until_dead([11]) <= 3
    assert {call.number for call in runs.last.calls()} == set(NUMBERS[:25])


def test_who_counts_again_and_again_blames_no_neighbour(tmp_path: Path) -> None:
    # Given a run whose settling is tried many times, as while a broker is out of reach
    runs = Runs(tmp_path, deadly=[11], crashes=2)
    runs.last.send(NUMBERS[:25])
    runs.receive_and_handle()
    for _ in range(4):
        dies(runs.last.ack, Point("airflow_broadway.producers.kit.suspects:Deaths.count"))

    # Then the next runs set aside what killed alone, and handle the rest
    assert runs.until_dead([11]) <= 5
    assert {call.number for call in runs.last.calls()} == set(NUMBERS[:25])


def test_what_was_set_aside_and_is_sent_back_is_handled_again(tmp_path: Path) -> None:
    # Given a message that a run has set aside before any callback saw it
    runs = Runs(tmp_path, deadly=[11], crashes=1, whole=True)
    runs.last.send([11])
    runs.until_dead([11])
    with runs.last.queue() as queue:
        [letter] = queue.dead_letters()
        assert letter.stage == "process"

        # When somebody has mended what it broke, and sends it back
        assert queue.requeue_dead() == 1
    runs.context["deadly"] = ()

    # Then it is handled like any other
    assert runs.one()["totals"]["acked"] == 1
    assert runs.last.depth() == (0, 0, 0, 0)


def test_what_a_dead_run_left_is_counted_by_whoever_sweeps(tmp_path: Path) -> None:
    # Given runs whose sensors never looked, as where the whole host died
    runs = Runs(tmp_path, deadly=[11], crashes=3)
    runs.last.send(NUMBERS[:25])
    runs.receive_and_handle()
    runs.receive_and_handle()

    # Then the next runs' sweeps count the deaths, and the third finds it
    assert runs.one()["isolation"]["batches"][0]["crashed"] == 1
    assert runs.last.dead() == [11]


def test_a_batcher_that_is_ending_while_process_is_cleared_has_not_died(tmp_path: Path) -> None:
    # Given a batcher at work, of a run whose process task somebody clears
    run = Run(tmp_path)
    run.send(NUMBERS[:5])
    reference = run.process()
    plan = plan_batches(
        run.staged, run.pipeline, "default", [reference["generation"]], try_label="1"
    )
    about = json.dumps({"version": 1, "plans": [plan.path], "marked": False})
    begin_try(run.staged.files, "batch.default", lambda _: about, TRIES)

    # When it is tried again before the batcher has said that it ended
    run.process(try_number=2)

    # Then no message counts a death
    assert not list(tmp_path.rglob("deaths/**/*"))


# ------------------------------------------------------------------------------------ who has died
@pytest.fixture
def open_run(tmp_path: Path) -> tuple[Run, OpenPlans]:
    """A run with three batches, of which none was handled."""
    run = Run(tmp_path)
    run.send(NUMBERS[:30])
    reference = run.process()
    plan = plan_batches(
        run.staged, run.pipeline, "default", [reference["generation"]], try_label="1"
    )
    return run, OpenPlans(run.staged, [plan.path])


def died(run: Run, plans: OpenPlans) -> list[int]:
    """The places of the batches that processes died of."""
    batches = [batch for _, batch in plans.open_batches()]
    found = died_of(run.staged.files, plans.heads[0].path, batches)
    return [place for place, batch in enumerate(batches) if batch.batch_id in found]


def test_an_application_dies_of_what_it_had_begun(open_run: tuple[Run, OpenPlans]) -> None:
    run, plans = open_run
    files = run.staged.files
    ids = [batch.batch_id for _, batch in plans.open_batches()]
    step = Step(run=ids, marked=True)
    _, work = plans.write_work("spark", {}, RunInfo(), step)
    assert died(run, plans) == []  # it never began
    say_started(files, "spark", work.try_number, WORK)
    assert died(run, plans) == []  # it had begun no batch

    _, work = plans.write_work("spark", {}, RunInfo(), step)
    say_started(files, "spark", work.try_number, WORK)
    mark_begun(files, "spark", work.try_number, WORK, ids[1])
    assert died(run, plans) == [1]

    _, work = plans.write_work("spark", {}, RunInfo(), Step())
    say_started(files, "spark", work.try_number, WORK)
    assert died(run, plans) == [0, 1, 2]  # nobody knows which


def test_a_death_is_noted_for_all_plans_that_the_application_was_at_work_on(
    open_run: tuple[Run, OpenPlans],
) -> None:
    run, plans = open_run
    files = run.staged.files
    [_, (_, done), (_, open_one)] = plans.open_batches()
    other = "batches/other/inputs/1"
    about = {"version": 1, "marked": True, "only": None, "plans": [plans.heads[0].path, other]}
    number, _ = begin_try(files, "spark", lambda _: json.dumps(about), WORK)
    say_started(files, "spark", number, WORK)
    files.create(paths.outcome(other, done.batch_id), "{}")
    for each in (done, open_one):
        mark_begun(files, "spark", number, WORK, each.batch_id)

    # Whichever plan is asked about first
    assert died_of(files, plans.heads[0].path, [done]) == set()
    assert died_of(files, other, [open_one]) == {open_one.batch_id}


def test_who_ended_in_order_or_worked_on_another_plan_died_of_nothing(
    open_run: tuple[Run, OpenPlans],
) -> None:
    run, plans = open_run
    files = run.staged.files
    _, work = plans.write_work("spark", {}, RunInfo(), Step())
    say_started(files, "spark", work.try_number, WORK)
    say_ended(files, "spark", work.try_number, WORK)
    for others in (["batches/default/others/1"], None):  # the latter as of an older release
        about: dict[str, Any] = {"version": 1, "marked": False, "only": None}
        about |= {} if others is None else {"plans": others}
        begin_try(files, "batch.default", lambda _, about=about: json.dumps(about), TRIES)  # type: ignore[misc]
    assert died(run, plans) == []


def test_a_damaged_file_costs_the_count_alone(tmp_path: Path) -> None:
    runs = Runs(tmp_path, deadly=[11], crashes=3)
    runs.last.send(NUMBERS[:25])
    runs.receive_and_handle()
    damaged = [*tmp_path.glob("staging/**/batches/**/data-*.parquet")]
    assert damaged
    for path in damaged:
        path.write_bytes(b"damaged")
    assert runs.last.ack()["totals"]["released"] > 0
