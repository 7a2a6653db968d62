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
from unittest import mock

import pytest

from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.core.formats import paths
from airflow_broadway.core.stages.isolating_processor import IsolatingProcessor
from airflow_broadway.producers.sqlite.producer import _Source
from airflow_broadway.runs.process import Process
from tests.unit.runs.deadly import NUMBER, PLACE, WAY, Deadly, DeadlyPartitioned, max_crashes
from tests.unit.runs.deadly_runs import Runs, dead_reasons, ending_of, forked


@pytest.fixture
def deadly(monkeypatch):
    """Sets which number ends its process, at which callback, and how."""

    def set_deadly(number=3, place="handle_message", way="exit"):
        for name, value in ((NUMBER, str(number)), (PLACE, place), (WAY, way)):
            monkeypatch.setenv(name, value)

    return set_deadly


@pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
@pytest.mark.parametrize(
    "place", ["handle_message", "prepare_messages", "transformer", "partition_by"]
)
def test_poison_message_of_1000_is_found_and_others_are_acked(place, executor, tmp_path, deadly):
    deadly(417, place, "segv" if place == "handle_message" else "exit")
    kind = DeadlyPartitioned if place == "partition_by" else Deadly
    options = {
        "executor": "processes" if executor == "processes" else "threads",
        "concurrency": 1 if executor == "inline" else 2,
    }
    runs = Runs(tmp_path, kind, processors=options, numbers=range(1000))

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


def test_killed_process_groups_are_narrowed_down_by_messages_in_hand(tmp_path, deadly):
    """As where the memory of a container ends: no parent lives."""
    deadly(17, way="group")
    runs = Runs(tmp_path, numbers=range(100))

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
def test_fifty_outside_kills_with_a_publisher_dead_letter_nothing(concurrency, tmp_path):
    chance = random.Random(concurrency)
    runs = Runs(tmp_path, processors={"concurrency": concurrency}, numbers=range(1000))
    published = 1000
    stopped = threading.Event()

    def publish():
        nonlocal published
        with runs.last.queue() as queue:
            while not stopped.wait(0.02):
                queue.send([b"%d" % published])
                published += 1

    for number in range(50):
        child = forked(runs.next().process)
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

    # Then the first undisturbed run handles all of it
    assert runs.one() == 0
    runs.next().sweep()
    assert runs.last.depth() == (0, 0, 0, 0)
    paths_of_reports = (tmp_path / "staging" / "Sums" / "sums").glob("*/report.json")
    reports = [json.loads(path.read_text()) for path in paths_of_reports]
    assert sum(report["totals"]["acked"] for report in reports) == published
    assert not runs.last.unmarked()


def test_single_good_message_survives_outside_kills(tmp_path, monkeypatch):
    """Up to ``max_crashes`` times; one more would count against it."""
    runs = Runs(tmp_path, numbers=[1])

    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(IsolatingProcessor, "handle", kill)
        patch.setattr(Deadly, "prepare_messages", kill)
        for _ in range(3):
            assert runs.one() == -9
    assert list(runs.history().alone.values()) == [2]
    assert runs.one() == 0
    assert runs.last.depth() == (0, 0, 0, 0)


def test_orderly_release_is_no_crash(tmp_path, monkeypatch):
    runs = Runs(tmp_path, numbers=range(30))

    with monkeypatch.context() as patch:
        patch.setattr(Process, "_publish", mock.Mock(side_effect=ProducerUnavailable("away")))
        assert runs.one() == 1
    runs.next().sweep()

    assert runs.history().crashes == 0
    assert runs.last.depth() == (30, 0, 0, 0)


def test_stopped_task_and_open_batches_are_no_crash(tmp_path):
    runs = Runs(tmp_path, numbers=range(30))
    runs.next().process()  # and its batcher never runs
    runs.last.ack()
    runs.next().sweep()
    assert runs.history().crashes == 0
    assert runs.last.depth() == (30, 0, 0, 0)


def test_crash_is_recorded_before_release(tmp_path, monkeypatch, deadly):
    deadly()
    runs = Runs(tmp_path, numbers=range(10))
    assert ending_of(forked(runs.next().process)) == 9
    seen: list[int] = []
    producer = type(runs.last.pipeline.producer)
    whole = producer.custodian

    class Looking:
        def __init__(self, custodian):
            self._custodian = custodian

        def __getattr__(self, name):
            return getattr(self._custodian, name)

        def settle(self, lease, settlement):
            assert settlement.rest == RELEASE
            seen.append(runs.history().crashes)
            return self._custodian.settle(lease, settlement)

    monkeypatch.setattr(
        producer, "custodian", lambda self, env: Looking(whole(self, env)), raising=True
    )
    runs.next().sweep()
    assert seen == [1]


def test_messages_in_hand_are_recorded_while_a_child_handles_them(tmp_path, monkeypatch, deadly):
    deadly()
    runs = Runs(tmp_path, numbers=range(10))
    assert runs.one() == 9
    monkeypatch.delenv(NUMBER)
    notes: list[int] = []
    whole = IsolatingProcessor.handle

    def looks(self, chunk):
        [generation] = [generation.generation for generation in runs.last.staged.generations()]
        notes.append(len(json.loads(runs.last.staged.files.read(paths.in_hand(generation)))["ids"]))
        return whole(self, chunk)

    monkeypatch.setattr(IsolatingProcessor, "handle", looks)
    run = runs.next()
    reference = run.process()
    assert reference["received"] == 10
    assert notes == [10]
    text = run.staged.files.read(paths.in_hand(reference["generation"]))
    assert json.loads(text)["ids"] == []


def test_pipeline_without_crashes_starts_no_child(tmp_path, monkeypatch):
    """A message that is retried is redelivered, too."""
    runs = Runs(tmp_path, numbers=range(10))
    with runs.last.queue() as queue:
        queue.receive("another", 10)
        queue.release("another")
    monkeypatch.setattr(IsolatingProcessor, "handle", None)
    assert runs.one() == 0
    assert runs.last.depth() == (0, 0, 0, 0)


def test_unimportable_pipeline_handles_suspects_in_the_parent(
    tmp_path, monkeypatch, deadly, caplog
):
    deadly()
    runs = Runs(tmp_path, numbers=range(10))
    assert runs.one() == 9
    monkeypatch.delenv(NUMBER)
    monkeypatch.setattr(Deadly, "__module__", "unusual_prefix_0123abcd_deadly")
    assert runs.next().process()["received"] == 10
    assert "no child process could be started for them (PipelineError: the Dag file" in caplog.text


def test_max_crashes_bounds_children_per_message(tmp_path, deadly):
    deadly()
    runs = Runs(tmp_path, numbers=[3])
    assert runs.one() == 9
    run = runs.next()
    max_crashes(run.pipeline.producer, 4)
    assert run.process()["failed"] == 1
    run.ack()
    assert dead_reasons(run) == {
        3: "crashed: it ended 4 processes that handled nothing else, the last with exit code 9"
    }


def test_source_that_fails_to_open_records_no_crash(tmp_path, monkeypatch):
    runs = Runs(tmp_path, numbers=[1])

    with monkeypatch.context() as patch:
        patch.setattr(_Source, "receive", mock.Mock(side_effect=ProducerUnavailable("away")))
        assert runs.one() == 1
    runs.next().sweep()
    assert runs.history().crashes == 0


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}'])
def test_damaged_record_of_messages_in_hand_holds_nothing_back(text, tmp_path, deadly):
    """As after a power failure."""
    deadly()
    runs = Runs(tmp_path, numbers=range(10))
    run = runs.next()
    assert ending_of(forked(run.process)) == 9
    [record] = run.staged.generations()
    run.staged.files.replace(paths.in_hand(record.generation), text)
    runs.next().sweep()
    assert runs.last.depth() == (10, 0, 0, 0)
    assert runs.history().crashes == 1
