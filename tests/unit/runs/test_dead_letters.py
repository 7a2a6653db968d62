"""Runs whose source is the dead letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.custody.dead_letters import Moved
from airflow_broadway.core.errors import ProducerError, RequestRefused
from airflow_broadway.core.model.run_source import DEAD_LETTERS, RunSource
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.runs.sources.choice import SourceRequest, choose_source
from airflow_broadway.runs.tasks import ProcessTask, UnstagedTask
from tests.unit.runs.steps import PlainSums, Run

SOURCE = RunSource(kind=DEAD_LETTERS)


def run_after_failures(folder: Path, numbers: list[int], run_id: str) -> Run:
    """A run after one whose messages became dead letters."""
    Run(folder, "manual__before", numbers=numbers).all()
    return Run(folder, run_id, finished=["manual__before"])


def process_task(
    run: Run, source: RunSource = SOURCE, try_number: int = 1, **budget: Any
) -> ProcessTask:
    task = run.task(try_number=try_number)
    return ProcessTask(
        run.staged, run.pipeline, task, run.ports, budget=Budget(**budget), source=source
    )


def test_dead_letters_are_handled_by_current_code(tmp_path):
    # Given five dead letters: those divisible by seven, and by five
    run = run_after_failures(tmp_path, list(range(1, 16)), "manual__letters")
    assert run.dead() == [5, 7, 10, 14, 15]
    received = len(run.calls())

    # When a run takes them for its source, with code that fails as before
    result = process_task(run).run()
    run.batch(result.reference)
    report = run.ack()

    # Then it has handled all once more, on their first attempt; those that fail again are dead
    assert result.reference["received"] == report["totals"]["received"] == 5
    again = run.calls()[received:]
    assert sorted(call.number for call in again) == [5, 10, 15]
    assert all(call.redelivered and call.attempt == 1 for call in again)
    assert run.dead() == [5, 7, 10, 14, 15]
    assert report["balanced"]


def test_only_first_producer_requeues(tmp_path):
    run = run_after_failures(tmp_path, [7], "manual__letters")
    task = ProcessTask(
        run.staged, run.pipeline, run.task(1), run.ports, index=1, budget=Budget(), source=SOURCE
    )
    assert task.run().reference["received"] == 0
    assert run.dead() == [7]


def test_unstaged_run_requeues_too(tmp_path):
    run = run_after_failures(tmp_path, [7, 8], "manual__letters")
    plain = Run(tmp_path, "manual__plain", pipeline=PlainSums)
    task = UnstagedTask(
        run.staged, plain.pipeline, run.task(), run.ports, budget=Budget(), source=SOURCE
    )
    assert task.run().reference["received"] == 1
    assert run.dead() == [7]


def test_missing_queue_fails_before_receiving(tmp_path):
    run = Run(tmp_path, "manual__letters")
    for file in tmp_path.glob("queue.db*"):
        file.unlink()
    task = process_task(run)
    with pytest.raises(ProducerError, match="there is no queue file"):
        task.run()
    assert run.staged.generations() == []


def test_only_chosen_dead_letters_are_requeued(tmp_path):
    run = run_after_failures(tmp_path, list(range(1, 16)), "manual__letters")
    with run.queue() as queue:
        chosen = [letter.message_id for letter in queue.dead_letters(limit=None)][:2]
    source = choose_source(
        run.pipeline, SourceRequest("r", kind=DEAD_LETTERS, letters={"ids": chosen})
    )
    task = process_task(run, source)

    assert task.run().reference["received"] == 2
    assert len(run.dead()) == 3
    assert run.staged.generations()[0].source["only"] == {"ids": chosen}


def test_chosen_dead_letters_are_deleted_and_nothing_received(tmp_path):
    run = run_after_failures(tmp_path, list(range(1, 16)), "manual__letters")
    run.send([8, 9])
    letters = {"pipeline": run.pipeline.name, "action": "delete", "stage": "process"}
    source = choose_source(run.pipeline, SourceRequest("r", kind=DEAD_LETTERS, letters=letters))
    with run.queue() as queue:
        early = [letter for letter in queue.dead_letters(limit=None) if letter.stage == "process"]
    assert 0 < len(early) < 5
    result = process_task(run, source, max_messages=0).run()
    report = run.ack()

    assert result.reference["received"] == report["totals"]["received"] == 0
    assert report["balanced"]
    assert len(run.dead()) == 5 - len(early)
    assert run.depth()[0] == 2


@pytest.mark.parametrize(
    ("letters", "error"),
    [
        ("all", "dead_letters is an object"),
        ({"id": "m"}, r"unknown names \['id'\]"),
        ({"ids": "m"}, "dead_letters.ids is a list"),
        ({"action": "move"}, "dead_letters.action is"),
        ({"reason": 1}, "dead_letters.reason is a text"),
        ({"since": "yesterday"}, "dead_letters.since is no timestamp"),
    ],
)
def test_invalid_choice_is_refused(tmp_path, letters, error):
    run = Run(tmp_path, "manual__letters")
    with pytest.raises(RequestRefused, match=error):
        choose_source(run.pipeline, SourceRequest("r", kind=DEAD_LETTERS, letters=letters))


def test_dead_letters_of_another_pipeline_are_ignored(tmp_path):
    run = Run(tmp_path, "manual__letters")
    letters = {"pipeline": "another", "action": "delete"}
    request = SourceRequest("r", kind=DEAD_LETTERS, letters=letters)

    assert choose_source(run.pipeline, request) == RunSource()
    with pytest.raises(RequestRefused, match="dead_letters is given"):
        choose_source(run.pipeline, request._replace(kind=""))


@pytest.mark.parametrize("action", ["requeue", "delete"])
@pytest.mark.parametrize("choice", [{"ids": ["gone"]}, {"reason": "mistyped"}])
def test_choice_that_moves_none_fails_except_on_retry(tmp_path, action, choice):
    run = run_after_failures(tmp_path, [7], "manual__letters")
    run.send([8])
    request = SourceRequest("r", kind=DEAD_LETTERS, letters={"action": action, **choice})
    source = choose_source(run.pipeline, request)

    def task(try_number):
        return process_task(run, source, try_number, max_messages=0)

    with pytest.raises(RequestRefused, match=r"no dead letters of .*nothing was received"):
        task(1).run()
    assert run.staged.generations() == []
    assert run.dead() == [7]
    # The try before may have moved them
    assert task(2).run().reference["received"] == 0


def test_immovable_dead_letters_fail_every_try(tmp_path, monkeypatch):
    run = run_after_failures(tmp_path, [7], "manual__letters")
    stays = Moved(0, refused={"l-1": "its queue is gone"})
    monkeypatch.setattr(SqliteQueue, "requeue", lambda *_: stays)
    task = process_task(run, try_number=2)
    with pytest.raises(RequestRefused, match="l-1 was not moved: its queue is gone"):
        task.run()
