"""Messages that end the process of a process task, and tasks that are killed from outside.

The tasks are real processes, which die; the child processes that they start are real too.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.core.formats import paths
from airflow_broadway.core.stages.isolating_processor import IsolatingProcessor
from airflow_broadway.producers.sqlite.producer import _Source
from airflow_broadway.runs.process import Process
from tests.unit.runs.deadly import NUMBER, PLACE, WAY, Deadly, DeadlyPartitioned, max_crashes
from tests.unit.runs.deadly_runs import Runs, dead_reasons, ending_of, forked


@pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
@pytest.mark.parametrize(
    "place", ["handle_message", "prepare_messages", "transformer", "partition_by"]
)
def test_one_of_1000_messages_ends_its_process_and_the_others_are_acknowledged(
    place: str, executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NUMBER, "417")
    monkeypatch.setenv(PLACE, place)
    monkeypatch.setenv(WAY, "segv" if place == "handle_message" else "exit")
    kind = DeadlyPartitioned if place == "partition_by" else Deadly
    options = {
        "executor": "processes" if executor == "processes" else "threads",
        "concurrency": 1 if executor == "inline" else 2,
    }
    runs = Runs(tmp_path, kind, processors=options)
    runs.last.send(range(1000))

    # Where the callback is called in a child process, the parent lives
    lives = executor == "processes" and place in ("handle_message", "prepare_messages")
    endings = [runs.one()]
    if not lives:
        endings.append(runs.one())

    assert endings == ([0] if lives else [-11 if place == "handle_message" else 9, 0])
    assert runs.last.depth() == (0, 0, 0, 1)
    [(number, reason)] = dead_reasons(runs.last).items()
    assert number == 417
    assert reason.startswith("crashed: it ended 2 processes that handled nothing else")
    report = json.loads((tmp_path / "staging" / runs.last.staged.path / "report.json").read_text())
    assert report["balanced"]


def test_a_group_of_processes_that_is_ended_with_each_try_is_found_by_what_was_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the memory of a container ends: no parent lives."""
    monkeypatch.setenv(NUMBER, "17")
    monkeypatch.setenv(PLACE, "handle_message")
    monkeypatch.setenv(WAY, "group")
    runs = Runs(tmp_path)
    runs.last.send(range(100))

    for _ in range(20):
        if runs.one() == 0:
            break

    # Nothing was in hand the first time; then all, 25, 5, then that one alone three times
    assert runs.history().crashes == 7
    assert not runs.history().alone  # forgotten once it is a dead letter
    assert runs.last.depth() == (0, 0, 0, 1)
    assert dead_reasons(runs.last) == {
        17: "crashed: it was the only message in hand when 3 tasks died"
    }


@pytest.mark.parametrize("concurrency", [1, 2])
def test_50_kills_from_outside_beside_a_publisher_dead_letter_nothing(
    concurrency: int, tmp_path: Path
) -> None:
    chance = random.Random(concurrency)
    runs = Runs(tmp_path, processors={"concurrency": concurrency})
    runs.last.send(range(1000))
    published = 1000
    stopped = threading.Event()

    def publish() -> None:
        nonlocal published
        with runs.last.queue() as queue:
            while not stopped.wait(0.02):
                queue.send([b"%d" % published])
                published += 1

    for number in range(50):
        run = runs.next()
        child = forked(run.process)
        if number % 10 == 0:
            publisher = threading.Thread(target=publish)
            publisher.start()
        time.sleep(chance.uniform(0.005, 0.3))
        if number % 3 == 0:  # a grace that is too short
            os.kill(child, signal.SIGTERM)
            time.sleep(chance.uniform(0.0, 0.02))
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if number % 10 == 9:
            stopped.set()
            publisher.join()
            stopped.clear()

    # Then quiet: the first run handles all of it
    assert runs.one() == 0
    runs.next().sweep()
    assert runs.last.depth() == (0, 0, 0, 0)
    reports = [
        json.loads(path.read_text())
        for path in (tmp_path / "staging" / "Sums" / "sums").glob("*/report.json")
    ]
    assert sum(report["totals"]["acked"] for report in reports) == published
    assert not runs.last.unmarked()


def test_a_single_good_message_survives_kills_from_outside_while_it_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as ``max_crashes`` says; one more is taken for its doing."""
    runs = Runs(tmp_path)
    runs.last.send([1])

    def kills(self: IsolatingProcessor, chunk: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(IsolatingProcessor, "handle", kills)
        patch.setattr(Deadly, "prepare_messages", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        for _ in range(3):
            assert runs.one() == -9
    assert list(runs.history().alone.values()) == [2]
    assert runs.one() == 0
    assert runs.last.depth() == (0, 0, 0, 0)


def test_what_is_given_back_in_order_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(tmp_path)
    runs.last.send(range(30))

    def fails(*_: Any) -> Any:
        raise ProducerUnavailable("the broker is away")

    with monkeypatch.context() as patch:
        patch.setattr(Process, "_publish", fails)
        assert runs.one() == 1
    runs.next().sweep()

    assert runs.history().crashes == 0
    assert runs.last.depth() == (30, 0, 0, 0)


def test_a_stopped_task_is_no_crash_and_neither_is_one_whose_batches_are_open(
    tmp_path: Path,
) -> None:
    runs = Runs(tmp_path)
    runs.last.send(range(30))
    runs.next().process()  # and its batcher never runs
    runs.last.ack()
    runs.next().sweep()
    assert runs.history().crashes == 0
    assert runs.last.depth() == (30, 0, 0, 0)


def test_crashes_are_on_record_before_their_messages_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NUMBER, "3")
    monkeypatch.setenv(PLACE, "handle_message")
    runs = Runs(tmp_path)
    runs.last.send(range(10))
    assert ending_of(forked(runs.next().process)) == 9
    seen: list[int] = []
    producer = type(runs.last.pipeline.producer)
    whole = producer.custodian

    class Looking:
        def __init__(self, custodian: Any) -> None:
            self._custodian = custodian

        def __getattr__(self, name: str) -> Any:
            return getattr(self._custodian, name)

        def settle(self, lease: Any, settlement: Settlement) -> Any:
            assert settlement.rest == RELEASE
            seen.append(runs.history().crashes)
            return self._custodian.settle(lease, settlement)

    monkeypatch.setattr(
        producer, "custodian", lambda self, env: Looking(whole(self, env)), raising=True
    )
    runs.next().sweep()
    assert seen == [1]


def test_the_messages_in_hand_are_written_down_while_a_child_handles_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NUMBER, "3")
    monkeypatch.setenv(PLACE, "handle_message")
    runs = Runs(tmp_path)
    runs.last.send(range(10))
    assert runs.one() == 9
    monkeypatch.delenv(NUMBER)
    notes: list[int] = []
    whole = IsolatingProcessor.handle

    def looks(self: IsolatingProcessor, chunk: Any) -> Any:
        [generation] = [each.generation for each in runs.last.staged.generations()]
        notes.append(len(json.loads(runs.last.staged.files.read(paths.in_hand(generation)))["ids"]))
        return whole(self, chunk)

    monkeypatch.setattr(IsolatingProcessor, "handle", looks)
    run = runs.next()
    reference = run.process()
    assert reference["received"] == 10
    assert notes == [10]
    text = run.staged.files.read(paths.in_hand(reference["generation"]))
    assert json.loads(text)["ids"] == []


def test_a_pipeline_without_crashes_lists_none_and_starts_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that is retried is redelivered, too."""
    runs = Runs(tmp_path)
    runs.last.send(range(10))
    with runs.last.queue() as queue:
        queue.receive("another", 10)
        queue.release("another")
    monkeypatch.setattr(IsolatingProcessor, "handle", None)
    assert runs.one() == 0
    assert runs.last.depth() == (0, 0, 0, 0)


def test_messages_of_a_class_that_no_child_can_import_are_handled_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(NUMBER, "3")
    monkeypatch.setenv(PLACE, "handle_message")
    runs = Runs(tmp_path)
    runs.last.send(range(10))
    assert runs.one() == 9
    monkeypatch.delenv(NUMBER)
    monkeypatch.setattr(Deadly, "__module__", "unusual_prefix_0123abcd_deadly")
    run = runs.next()
    assert run.process()["received"] == 10
    assert "no child process could be started for them (PipelineError: the Dag file" in caplog.text


def test_max_crashes_bounds_the_children_of_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NUMBER, "3")
    monkeypatch.setenv(PLACE, "handle_message")
    runs = Runs(tmp_path)
    runs.last.send([3])
    assert runs.one() == 9
    run = runs.next()
    max_crashes(run.pipeline.producer, 4)
    assert run.process()["failed"] == 1
    run.ack()
    assert dead_reasons(run) == {
        3: "crashed: it ended 4 processes that handled nothing else, the last with exit code 9"
    }


def test_a_source_that_fails_to_open_leaves_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(tmp_path)
    runs.last.send([1])

    def fails(*_: Any, **__: Any) -> Any:
        raise ProducerUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(_Source, "receive", fails)
        assert runs.one() == 1
    runs.next().sweep()
    assert runs.history().crashes == 0


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}'])
def test_a_damaged_note_of_what_was_in_hand_keeps_no_message_back(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a host that lost its power leaves it."""
    monkeypatch.setenv(NUMBER, "3")
    monkeypatch.setenv(PLACE, "handle_message")
    runs = Runs(tmp_path)
    runs.last.send(range(10))
    run = runs.next()
    assert ending_of(forked(run.process)) == 9
    [record] = run.staged.generations()
    run.staged.files.replace(paths.in_hand(record.generation), text)
    runs.next().sweep()
    assert runs.last.depth() == (10, 0, 0, 0)
    assert runs.history().crashes == 1
