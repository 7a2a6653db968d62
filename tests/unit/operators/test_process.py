"""One execution of a process task, without Airflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Message
from airflow_broadway.core.errors import LeaseLapsed, StagingError
from airflow_broadway.core.intake import Budget
from airflow_broadway.operators._process import Process
from airflow_broadway.staging.run import PUBLISHED, SETTLED
from tests.unit.operators.steps import PlainSums, Run, Sums

COUNT = 40


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    with made.queue() as queue:
        queue.send([b"%d" % number for number in range(1, COUNT + 1)])
    return made


def execution(run: Run, **budget: Any) -> Process:
    owner = {"task_id": "process", "map_index": 0, "try_number": 1}
    return Process(run.staged, run.pipeline, env=run.env("a" * 32, owner), budget=Budget(**budget))


def check_given_back(run: Run) -> None:
    """Nothing is held, nothing was settled, and no attempt was used."""
    assert run.depth() == (COUNT, 0, 0, 0)
    with run.queue() as queue:
        assert queue.leases() == []
        assert {each.attempt for each in queue.receive("look", COUNT)} == {1}


def test_what_is_published_names_what_was_received(run: Run) -> None:
    reference = run.process(max_messages=30)

    manifest = run.staged.manifest(reference["generation"])
    assert manifest is not None
    assert (manifest.received, manifest.failed) == (30, 4)
    assert manifest.batchers == {"default": 26}
    assert manifest.stopped == "max_messages"
    assert run.staged.state(reference["generation"]) == PUBLISHED
    assert run.depth() == (10, 0, 30, 0)


def test_an_empty_run_is_settled_by_its_process_task(tmp_path: Path) -> None:
    run = Run(tmp_path)

    reference = run.process()

    assert (reference["received"], reference["stopped"]) == (0, "empty")
    assert run.staged.state(reference["generation"]) == SETTLED
    assert run.ack()["balanced"]


def test_a_pipeline_without_batchers_is_settled_by_its_process_task(tmp_path: Path) -> None:
    run = Run(tmp_path, pipeline=PlainSums)
    with run.queue() as queue:
        queue.send([b"%d" % number for number in range(1, 15)])

    reference = run.process()

    assert run.staged.state(reference["generation"]) == SETTLED
    assert run.depth() == (0, 0, 0, 2)


def test_a_signal_stops_it_and_what_it_has_is_published(run: Run) -> None:
    made = execution(run)
    handle = Sums.handle_message

    def signalled(self: Sums, processor: str, message: Message, context: Any) -> Message:
        made.stop("signal")
        return handle(self, processor, message, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sums, "handle_message", signalled)
        reference = made.run()

    assert reference["stopped"] == "signal"
    assert run.staged.state("a" * 32) == PUBLISHED
    run.batch(reference)
    assert run.ack()["balanced"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_no_failure_of_a_callback_ends_it_and_gives_back(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    made = execution(run)
    # Where no callback is at work.
    monkeypatch.setattr(
        "airflow_broadway.staging.writer.ProcessWriter.messages", _raiser(error("enough"))
    )

    with pytest.raises(error):
        made.run()

    check_given_back(run)
    assert run.staged.state("a" * 32) == SETTLED


def test_a_message_that_a_callback_swapped_for_another_fails_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Sums.handle_message

    def swapping(self: Sums, processor: str, message: Message, context: Any) -> Message:
        if message.data == b"1":
            return message.with_message_id("made-up")
        return handle(self, processor, message, context)

    monkeypatch.setattr(Sums, "handle_message", swapping)

    reference = execution(run).run()

    assert (reference["received"], reference["failed"]) == (COUNT, 6)
    run.batch(reference)
    assert run.ack()["balanced"]
    assert 1 in run.dead()


def test_a_lease_that_lapsed_meanwhile_is_not_published(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a sweep that gave the messages back while they were handled
    handle = Sums.handle_message
    given_back: list[int] = []

    def slow(self: Sums, processor: str, message: Message, context: Any) -> Message:
        if not given_back:
            with run.queue() as queue:
                given_back.append(queue.release("a" * 32).released)
        return handle(self, processor, message, context)

    monkeypatch.setattr(Sums, "handle_message", slow)

    with pytest.raises(LeaseLapsed):
        execution(run).run()

    assert given_back == [COUNT]
    assert run.staged.manifest("a" * 32) is None
    check_given_back(run)


def test_a_staging_that_fails_gives_back_even_if_that_cannot_be_noted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a disk that takes no manifest, and no journal either
    from airflow_broadway.staging.store import Folder

    create = Folder.create

    def full(self: Folder, path: str, text: str) -> bool:
        if "manifest" in path or "journal" in path:
            raise StagingError("no space is left")
        return create(self, path, text)

    monkeypatch.setattr(Folder, "create", full)
    with pytest.raises(StagingError, match="no space"):
        execution(run).run()
    monkeypatch.undo()

    # Then the messages are back at once, not when their lease lapses; and the sum is right
    check_given_back(run)
    assert run.ack()["balanced"]


def _raiser(error: BaseException) -> Any:
    def raise_it(*_: Any, **__: Any) -> None:
        raise error

    return raise_it
