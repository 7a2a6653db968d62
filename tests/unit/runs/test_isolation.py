"""Batches that processes die of: alone, in halves, and down to the message that is to blame."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from airflow_broadway import BatchInfo
from airflow_broadway.core.custody.run_summary import lines_of
from airflow_broadway.core.errors import BroadwayError, StagingError
from airflow_broadway.core.formats.deaths import TRIES, Deaths
from airflow_broadway.core.formats.ownership import begin_try, highest_try
from airflow_broadway.core.formats.parts import part_id
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.runs import tasks
from airflow_broadway.runs.poison.child_process import ChildProcess
from airflow_broadway.runs.python_batches import PythonBatches
from airflow_broadway.runs.tasks import BatchTask
from airflow_broadway.staging import crash_records
from airflow_broadway.staging.crash_records import record_crash
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.planner import plan_batches
from tests.deaths import WAYS, die
from tests.unit.runs.steps import Run, Sums


class Deadly(Sums):
    """A process dies that handles one of ``context["deadly"]``."""

    name = "Sums"

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        handled = super().handle_batch(batcher, messages, batch_info, context)
        with open(context["sizes"], "a") as file:
            file.write(json.dumps([batch_info.batch_id, len(messages)]) + "\n")
        if "at_batch" in context:
            context["at_batch"]()
            time.sleep(0.2)  # it is told to stop meanwhile
        if any(item.data in context["deadly"] for item in messages):
            die(context.get("way", "exit"))
        return handled


class World:
    """A run of ten messages a batch, whose batches a task handles again and again.

    :param in_hand: Numbers that were in hand in each crash of an earlier run: its messages came
        again.
    """

    def __init__(
        self,
        folder: Path,
        deadly: list[int],
        count: int,
        crashes: int = 2,
        in_hand: Sequence[Sequence[int]] = (),
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.sizes = folder / "sizes"
        self.context: dict[str, Any] = {"deadly": deadly, "sizes": str(self.sizes)}
        self.run = Run(folder, pipeline=Deadly, context=self.context)
        pipeline = self.run.pipeline
        object.__setattr__(pipeline.producer, "max_crashes", crashes)
        # Neither by seven nor by five: what fails otherwise.
        self.numbers = [n for n in range(1, 10 * count) if n % 7 and n % 5][:count]
        self.run.send(self.numbers)
        if in_hand:
            self._crash(in_hand)
        self.reference = self.run.process()
        self.plan: BatchPlan = plan_batches(
            self.run.staged, pipeline, "default", [self.reference["generation"]], try_label="1"
        )
        self.batches = len(Recorded(self.run.staged).batches(self.plan))

    def _crash(self, in_hand: Sequence[Sequence[int]]) -> None:
        """Have an earlier run receive the messages, and crashes on record."""
        earlier = Run(self.run.folder, "earlier", pipeline=Deadly, context=self.context)
        [generation] = {earlier.process()["generation"]}
        rows = {
            row["data_json"]: row["message_id"]
            for path in earlier.staged.manifest(generation).files["default"]  # type: ignore[union-attr]
            for row in pq.read_table(
                f"{self.run.folder}/staging/{earlier.staged.path}/{path}"
            ).to_pylist()
        }
        earlier.ack()
        store, now = earlier.staged.store, earlier.staged.clock.now()
        for index, numbers in enumerate(in_hand):
            ids = [rows[str(number)] for number in numbers]
            record_crash(store, "Sums", f"crash-{index}", ids, now)

    def task(self, try_number: int = 1, cleared: int = 0, forks: bool = True) -> BatchTask:
        task = replace(self.run.task(try_number=try_number), task_id="batch.default", map_index=-1)
        task = replace(task, cleared=cleared, forks=forks)
        return BatchTask(
            self.run.staged, self.run.pipeline, task, self.run.ports, batcher="default"
        )

    def first_try(self) -> str:
        """A try that handles batches in the task's own process; how that ended."""
        return ChildProcess(lambda: self.task().handle(self.plan)).wait()

    def killed_try(self, number: int, when: Callable[[], bool]) -> bool:
        """A try whose processes are all killed from outside, once something is so; whether they
        were, and it had not ended before.
        """

        def work() -> None:
            os.setpgid(0, 0)
            self.task(number).handle(self.plan)

        apart = ChildProcess(work)
        while not when():
            if os.waitpid(apart._pid, os.WNOHANG)[0]:
                return False
            time.sleep(0.002)
        os.killpg(apart._pid, signal.SIGKILL)
        os.waitpid(apart._pid, 0)
        return True

    def seen(self) -> list[tuple[str, int]]:
        """The id and the size of each batch that was begun, in order."""
        return [tuple(json.loads(line)) for line in self.sizes.read_text().splitlines()]

    def deaths(self) -> int:
        return self.look().count

    def look(self) -> Deaths:
        """Returns the recorded deaths."""
        deaths = Deaths(self.run.staged.files, "batch.default", TRIES)
        deaths.look()
        return deaths


def test_a_poison_message_is_set_aside_and_its_neighbours_are_handled(tmp_path: Path) -> None:
    # Given three batches, in one of which a message kills its process
    world = World(tmp_path, deadly=[11], count=24)
    assert world.batches == 3

    # When the task's first try has died, and Airflow tries again
    assert world.first_try() == "exit code 9"
    counts = world.task(2).handle(world.plan)
    report = world.run.ack()

    # Then all but that one were handled, and it is a dead letter that says why
    assert counts is not None
    assert counts["without_outcome"] == 0
    assert (counts["failed"], counts["successful"]) == (1, 23)
    assert world.run.dead() == [11]
    [letter] = world.run.queue().dead_letters()
    assert letter.reason == "crashed: it ended 2 processes that handled nothing else"
    assert letter.stage == "batch"
    assert report["balanced"]
    totals = report["totals"]
    assert (totals["acked"], totals["dead_lettered"], totals["released"]) == (23, 1, 0)
    assert report["isolation"] == {
        "deaths": world.deaths(),
        "interruptions": 1,
        "batches": [{"batcher": "default", "split": 3, "crashed": 1}],
    }
    lines = lines_of(report)
    assert f"{world.deaths()} processes died at batches." in lines
    assert "1 whole task died at batches, which counts against no message." in lines
    assert "  default: 3 batches split, 1 message dead-lettered (crashed)" in lines
    # And each success was recorded in one batch
    done = Counter(call.number for call in world.run.calls())
    assert set(done) == set(world.numbers)


@pytest.mark.parametrize("way", WAYS)
def test_one_of_a_hundred_messages_that_kills_is_found_by_the_try_that_forks(
    tmp_path: Path, way: str
) -> None:
    # Given a message of a hundred that ends its process, and a first try that ended by it
    world = World(tmp_path, deadly=[117], count=100, crashes=5)
    world.run.pipeline.context["way"] = way
    assert world.first_try()

    # When Airflow tries again
    counts = world.task(2).handle(world.plan)
    report = world.run.ack()

    # Then this try has handled all others, and that one is a dead letter
    assert counts is not None
    assert (counts["failed"], counts["successful"], counts["without_outcome"]) == (1, 99, 0)
    assert world.run.dead() == [117]
    [letter] = world.run.queue().dead_letters()
    assert letter.reason == "crashed: it ended 5 processes that handled nothing else"
    assert (report["totals"]["acked"], report["totals"]["dead_lettered"]) == (99, 1)
    assert report["balanced"]


def test_a_task_outlives_what_processes_died_of_in_earlier_runs(tmp_path: Path) -> None:
    # Given a message that kills its process, in a run that holds suspects
    world = World(tmp_path, deadly=[11], count=16, in_hand=[()])

    # When the task is tried, once
    counts = world.task().handle(world.plan)
    report = world.run.ack()

    # Then that one try has set the message aside, and handled each other once
    assert counts is not None
    assert (counts["failed"], counts["successful"], counts["without_outcome"]) == (1, 15, 0)
    assert world.run.dead() == [11]
    assert report["balanced"]
    assert world.deaths() > 1
    done = Counter(call.number for call in world.run.calls())
    assert set(done) == set(world.numbers)


def test_of_suspects_that_kill_no_more_one_process_handles_all(tmp_path: Path) -> None:
    world = World(tmp_path / "suspect", deadly=[], count=16, in_hand=[()])
    other = World(tmp_path / "other", deadly=[], count=16)
    assert world.task().handle(world.plan) == other.task().handle(other.plan)
    assert world.deaths() == 0
    assert highest_try(world.run.staged.files, "batch.default", TRIES) == 1
    assert len(world.seen()) == world.batches


def test_where_a_fork_cannot_ask_the_host_none_is_made_for_suspects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, deadly=[], count=12, in_hand=[()])
    monkeypatch.delattr(tasks, "ChildProcess")
    counts = world.task(forks=False).handle(world.plan)
    assert counts is not None
    assert counts["successful"] == 12


def test_what_a_process_of_its_own_raises_is_raised_by_the_task(
    tmp_path: Path, monkeypatch: Any
) -> None:
    # Given batches that no process can begin
    world = World(tmp_path, deadly=[], count=12, in_hand=[()])

    def fails(self: Any) -> Any:
        raise StagingError("the disk is gone")

    monkeypatch.setattr(PythonBatches, "_begin", fails)

    # When the task handles them, then it fails with that error, and nothing died
    with pytest.raises(BroadwayError, match="StagingError: the disk is gone"):
        world.task().handle(world.plan)
    assert world.deaths() == 0


def test_after_a_death_a_process_that_never_begins_is_the_last(
    tmp_path: Path, monkeypatch: Any
) -> None:
    world = World(tmp_path, deadly=[1], count=12)
    world.first_try()
    begun = tmp_path / "begun"

    def fails(self: Any) -> Any:
        with begun.open("a") as file:
            file.write("x")
        raise StagingError("the disk is gone")

    monkeypatch.setattr(PythonBatches, "_begin", fails)
    with pytest.raises(BroadwayError, match="StagingError: the disk is gone"):
        world.task(2).handle(world.plan)
    assert begun.read_text() == "x"


def test_a_stop_reaches_the_process_of_its_own_and_is_no_death(tmp_path: Path) -> None:
    # Given a task that holds suspects, whose process is at a batch that stops the task
    world = World(tmp_path, deadly=[], count=24, in_hand=[()])
    task = world.task()
    world.run.pipeline.context["at_batch"] = lambda: os.kill(os.getppid(), signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, lambda *_: task.stop())
    try:
        counts = task.handle(world.plan)
    finally:
        signal.signal(signal.SIGUSR1, before)

    # Then that batch is finished, no other is begun, and nobody died
    assert counts is not None
    assert 1 <= len(world.seen()) < world.batches
    assert counts["without_outcome"] == world.batches - len(world.seen())
    assert world.deaths() == 0
    # And another try handles the rest
    del world.run.pipeline.context["at_batch"]
    counts = world.task(2).handle(world.plan)
    assert counts is not None
    assert counts["without_outcome"] == 0
    assert world.deaths() == 0


def test_a_batch_goes_alone_then_in_halves_whose_ids_are_its_own(tmp_path: Path) -> None:
    world = World(tmp_path, deadly=[11], count=16)
    poison, other = Recorded(world.run.staged).batches(world.plan)
    world.first_try()
    world.task(2).handle(world.plan)

    # The task's own death counts for nothing.  Twice among the others, then alone, then in halves;
    # what was handled is not handled again
    whole = (poison.batch_id, 10)
    assert world.seen()[:5] == [whole, whole, whole, (other.batch_id, 6), whole]
    lower, upper = (part_id(poison.batch_id, number) for number in (0, 1))
    assert world.seen()[5:7] == [(lower, 5), (upper, 5)]
    left, right = (part_id(upper, number) for number in (0, 1))
    assert world.seen()[7] == (right, 3)
    last, rest = (part_id(right, number) for number in (0, 1))
    assert world.seen()[8:] == [(left, 2), (rest, 2), (last, 1), (last, 1), (last, 1)]


def test_a_try_that_is_killed_on_its_way_is_gone_on_with(tmp_path: Path) -> None:
    # Given a task that is killed again and again while it isolates a message
    world = World(tmp_path, deadly=[3], count=12)
    world.first_try()
    for number in range(2, 40):
        apart = ChildProcess(lambda number=number: world.task(number).handle(world.plan))  # type: ignore[misc]
        time.sleep(0.05)
        os.kill(apart._pid, 9)
        os.waitpid(apart._pid, 0)
        if world.deaths() >= 4:
            break

    # When it is left alone
    counts = world.task(99).handle(world.plan)

    # Then nothing is lost, nothing is set aside but the one that kills
    assert counts is not None
    assert counts["without_outcome"] == 0
    world.run.ack()
    assert world.run.dead() == [3]
    assert world.run.depth() == (0, 0, 0, 1)


def test_if_everything_dies_nothing_is_blamed(tmp_path: Path, monkeypatch: Any) -> None:
    # Given a host on which every process dies, and a small budget
    world = World(tmp_path, deadly=list(range(100)), count=12)
    monkeypatch.setattr(tasks, "MOST_PROCESSES", 12)
    world.first_try()
    counts = world.task(2).handle(world.plan)

    # Then no message is set aside: all go back, and come with a later run
    assert counts is not None
    assert counts["successful"] == counts["failed"] == 0
    assert world.run.ack()["totals"]["released"] == 12
    assert world.run.dead() == []
    # And a later try begins no more processes
    seen = len(world.seen())
    world.task(3).handle(world.plan)
    assert len(world.seen()) == seen


def test_who_clears_the_task_grants_as_many_processes_once_more(
    tmp_path: Path, monkeypatch: Any
) -> None:
    # Given a task whose budget is used up
    world = World(tmp_path, deadly=list(range(100)), count=12)
    monkeypatch.setattr(tasks, "MOST_PROCESSES", 5)
    world.first_try()
    world.task(2).handle(world.plan)
    used = len(world.seen())

    # A retry begins none, and a cleared task does
    world.task(3).handle(world.plan)
    assert len(world.seen()) == used
    world.task(4, cleared=1).handle(world.plan)
    granted = len(world.seen()) - used
    assert granted > 0
    world.task(5, cleared=1).handle(world.plan)
    assert len(world.seen()) == used + granted


def killed(world: World, kills: int, at: Callable[[], bool]) -> dict[str, int]:
    """Kill the whole task so often; the counts of the first try that is left alone."""
    tries = 0
    for _ in range(kills):
        tries += 1
        assert world.killed_try(tries, at)
    counts = world.task(tries + 1).handle(world.plan)
    assert counts is not None
    return counts


def slow(world: World, seconds: float) -> Callable[[], bool]:
    """Have each batch take a while; whether a batch has begun since the last call."""
    world.run.pipeline.context["at_batch"] = lambda: time.sleep(seconds)
    before = 0

    def begun() -> bool:
        nonlocal before
        now = len(world.seen()) if world.sizes.exists() else 0
        found, before = now > before, max(now, before)
        return found

    return begun


def test_a_task_that_is_killed_from_outside_at_its_only_message_blames_it_not(
    tmp_path: Path,
) -> None:
    # Given a batch of one message, and a task that is killed from outside whenever it has begun
    world = World(tmp_path, deadly=[], count=1, crashes=5)
    counts = killed(world, 5, slow(world, 0.3))

    # Then it is handled once nobody kills
    assert (counts["successful"], counts["failed"]) == (1, 0)
    assert (world.look().count, world.look().interruptions) == (0, 5)
    assert world.run.ack()["totals"]["acked"] == 1
    assert world.run.dead() == []


def test_fifty_kills_from_outside_blame_no_message(tmp_path: Path) -> None:
    # Given good batches, and a task that is killed whenever it has begun one
    world = World(tmp_path, deadly=[], count=16, crashes=5)
    counts = killed(world, 50, slow(world, 0.1))

    # Then the first quiet try handles them, whole, and nothing is set aside
    assert (counts["successful"], counts["failed"], counts["without_outcome"]) == (16, 0, 0)
    assert {size for _, size in world.seen()} <= {10, 6}
    assert world.look().count == 0
    assert world.run.ack()["totals"]["acked"] == 16
    assert world.run.depth() == (0, 0, 0, 0)


@pytest.mark.parametrize(("crashes", "size"), [(1, 5), (2, 1)])
def test_a_batch_with_messages_that_were_in_hand_is_split_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crashes: int, size: int
) -> None:
    monkeypatch.setattr(crash_records, "_PORTIONS", {1: 5})
    world = World(tmp_path, deadly=[], count=20, in_hand=[[11]] * crashes)
    counts = world.task().handle(world.plan)
    assert counts is not None
    assert counts["without_outcome"] == 0
    # The other batch runs first, whole
    assert [found for _, found in world.seen()] == [10, *[size] * (10 // size)]
    assert world.run.ack()["totals"]["acked"] == 20


def test_a_message_that_was_alone_in_hand_too_often_is_set_aside(tmp_path: Path) -> None:
    # Given a message that was alone in hand in three crashes on record
    world = World(tmp_path, deadly=[11], count=16, crashes=3, in_hand=[[11]] * 3)
    world.run.pipeline.context["way"] = "group"

    # When it ends one more task, with its processes
    def work() -> None:
        os.setpgid(0, 0)
        world.task(1).handle(world.plan)

    assert ChildProcess(work).wait() == "killed by SIGKILL"

    # Then the next try sets it aside, the others being handled, and forgets its crashes
    world.run.pipeline.context["way"] = "exit"
    counts = world.task(2).handle(world.plan)
    assert counts is not None
    assert (counts["successful"], counts["failed"]) == (15, 1)
    assert world.look().count == 0
    world.run.ack()
    [letter] = world.run.queue().dead_letters()
    reason = "crashed: it was the only message in hand when 4 tasks died"
    assert (int(letter.body), letter.reason) == (11, reason)
    staged = world.run.staged
    history = crash_records.load_crash_history(staged.store, "Sums", staged.clock.now())
    assert (history.crashes, history.in_hand) == (3, {})


def test_an_execution_that_the_host_lost_counts_no_death_of_its_successors_processes(
    tmp_path: Path,
) -> None:
    # Given an execution whose process works, while another execution has begun one
    world = World(tmp_path, deadly=[], count=24, in_hand=[()])
    files = world.run.staged.files

    def takes_over() -> None:
        about = {"version": 1, "plans": [world.plan.path], "marked": True, "only": None}
        begin_try(files, "batch.default", lambda _: json.dumps(about | {"parent": "other"}), TRIES)
        time.sleep(1.2)  # what was read of ownership serves for a second

    world.run.pipeline.context["at_batch"] = takes_over

    # When it sees that, then it stops, and nothing has died
    with pytest.raises(BroadwayError, match=r"try 2 of 'batch[.]default' has begun"):
        world.task().handle(world.plan)
    assert (world.look().count, world.look().interruptions) == (0, 0)


def test_a_stop_is_no_death(tmp_path: Path) -> None:
    world = World(tmp_path, deadly=[], count=12)
    world.task().handle(world.plan)
    assert world.deaths() == 0
    deaths = Deaths(world.run.staged.files, "batch.default", TRIES)
    deaths.look(over=None)
    assert (deaths.count, deaths.interruptions) == (0, 0)


def test_a_task_that_is_stopped_before_its_first_batch_begins_none(tmp_path: Path) -> None:
    world = World(tmp_path, deadly=[], count=12)
    task = world.task()
    task.stop()
    counts = task.handle(world.plan)
    assert counts is not None
    assert counts["without_outcome"] == world.batches
    assert not world.sizes.exists()


def test_a_process_whose_own_child_outlives_it_is_waited_for_no_longer(tmp_path: Path) -> None:
    def work() -> None:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        (tmp_path / "child").write_text(str(child))
        os._exit(1)

    apart, began = ChildProcess(work), time.monotonic()
    try:
        assert (apart.wait(), apart.raised) == ("exit code 1", "")
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert time.monotonic() - began < 30


def test_a_single_message_of_a_run_needs_no_neighbours(tmp_path: Path) -> None:
    world = World(tmp_path, deadly=[1], count=1, crashes=3)
    world.first_try()
    world.task(2).handle(world.plan)
    world.run.ack()
    assert world.run.dead() == [1]
    assert [size for _, size in world.seen()] == [1, 1, 1, 1]


@pytest.mark.parametrize("deadly", [[2, 12], [1, 2, 3, 4]])
def test_several_poison_messages_are_each_found(tmp_path: Path, deadly: list[int]) -> None:
    world = World(tmp_path, deadly=deadly, count=16, crashes=1)
    world.first_try()
    counts = world.task(2).handle(world.plan)
    assert counts is not None
    world.run.ack()
    assert world.run.dead() == deadly
    assert counts["successful"] == 16 - len(deadly)
