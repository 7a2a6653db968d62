"""Runs whose source is the dead letters."""

from __future__ import annotations

from pathlib import Path

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


def mended(folder: Path, numbers: list[int], run_id: str) -> Run:
    """Messages that died; and another run, whose code would take some of them."""
    before = Run(folder, "manual__before")
    before.send(numbers)
    before.batch(before.process())
    before.ack()
    return Run(folder, run_id, finished=["manual__before"])


def test_a_run_of_the_dead_letters_handles_them_by_the_code_of_today(tmp_path: Path) -> None:
    # Given five dead letters: those divisible by seven, and by five
    run = mended(tmp_path, list(range(1, 16)), "manual__letters")
    assert run.dead() == [5, 7, 10, 14, 15]
    received = len(run.calls())

    # When a run takes them for its source, with code that fails as before
    task = ProcessTask(
        run.staged, run.pipeline, run.task(), run.ports, budget=Budget(), source=SOURCE
    )
    done = task.run()
    run.batch(done.reference)
    report = run.ack()

    # Then it has handled each once more, on its first attempt, and set those aside that fail again
    assert done.reference["received"] == report["totals"]["received"] == 5
    again = run.calls()[received:]
    assert sorted(each.number for each in again) == [5, 10, 15]
    assert all(each.redelivered and each.attempt == 1 for each in again)
    assert run.dead() == [5, 7, 10, 14, 15]
    assert report["balanced"]


def test_only_the_first_of_a_runs_producers_sends_them_back(tmp_path: Path) -> None:
    run = mended(tmp_path, [7], "manual__letters")
    task = ProcessTask(
        run.staged, run.pipeline, run.task(1), run.ports, index=1, budget=Budget(), source=SOURCE
    )
    assert task.run().reference["received"] == 0
    assert run.dead() == [7]


def test_a_run_without_staging_too(tmp_path: Path) -> None:
    run = mended(tmp_path, [7, 8], "manual__letters")
    plain = Run(tmp_path, "manual__plain", pipeline=PlainSums)
    task = UnstagedTask(
        run.staged, plain.pipeline, run.task(), run.ports, budget=Budget(), source=SOURCE
    )
    assert task.run().reference["received"] == 1
    assert run.dead() == [7]


def test_a_place_that_is_not_there_ends_the_run_before_it_receives(tmp_path: Path) -> None:
    run = Run(tmp_path, "manual__letters")
    for file in tmp_path.glob("queue.db*"):
        file.unlink()
    task = ProcessTask(
        run.staged, run.pipeline, run.task(), run.ports, budget=Budget(), source=SOURCE
    )
    with pytest.raises(ProducerError, match="there is no queue file"):
        task.run()
    assert run.staged.generations() == []


def test_a_run_sends_back_the_letters_that_are_chosen_and_no_other(tmp_path: Path) -> None:
    run = mended(tmp_path, list(range(1, 16)), "manual__letters")
    with run.queue() as queue:
        chosen = [each.message_id for each in queue.dead_letters(limit=None)][:2]
    source = choose_source(
        run.pipeline, SourceRequest("r", kind=DEAD_LETTERS, letters={"ids": chosen})
    )
    task = ProcessTask(
        run.staged, run.pipeline, run.task(), run.ports, budget=Budget(), source=source
    )

    assert task.run().reference["received"] == 2
    assert len(run.dead()) == 3
    assert run.staged.generations()[0].source["only"] == {"ids": chosen}


def test_a_run_deletes_the_letters_that_are_chosen_and_receives_nothing(tmp_path: Path) -> None:
    run = mended(tmp_path, list(range(1, 16)), "manual__letters")
    run.send([8, 9])
    letters = {"pipeline": run.pipeline.name, "action": "delete", "stage": "process"}
    source = choose_source(run.pipeline, SourceRequest("r", kind=DEAD_LETTERS, letters=letters))
    with run.queue() as queue:
        early = [each for each in queue.dead_letters(limit=None) if each.stage == "process"]
    assert 0 < len(early) < 5
    task = ProcessTask(
        run.staged,
        run.pipeline,
        run.task(),
        run.ports,
        budget=Budget(max_messages=0),
        source=source,
    )
    done = task.run()
    report = run.ack()

    assert done.reference["received"] == report["totals"]["received"] == 0
    assert report["balanced"]
    assert len(run.dead()) == 5 - len(early)
    assert run.depth()[0] == 2


@pytest.mark.parametrize(
    ("letters", "said"),
    [
        ("all", "dead_letters is an object"),
        ({"id": "m"}, r"unknown names \['id'\]"),
        ({"ids": "m"}, "dead_letters.ids is a list"),
        ({"action": "move"}, "dead_letters.action is"),
        ({"reason": 1}, "dead_letters.reason is a text"),
        ({"since": "yesterday"}, "dead_letters.since is no timestamp"),
    ],
)
def test_a_choice_of_letters_that_is_none_refuses_the_run(
    tmp_path: Path, letters: object, said: str
) -> None:
    run = Run(tmp_path, "manual__letters")
    with pytest.raises(RequestRefused, match=said):
        choose_source(run.pipeline, SourceRequest("r", kind=DEAD_LETTERS, letters=letters))


def test_letters_of_another_pipeline_of_the_dag_leave_a_run_as_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path, "manual__letters")
    letters = {"pipeline": "another", "action": "delete"}
    asked = SourceRequest("r", kind=DEAD_LETTERS, letters=letters)

    assert choose_source(run.pipeline, asked) == RunSource()
    with pytest.raises(RequestRefused, match="dead_letters is given"):
        choose_source(run.pipeline, asked._replace(kind=""))


@pytest.mark.parametrize("action", ["requeue", "delete"])
@pytest.mark.parametrize("choice", [{"ids": ["gone"]}, {"reason": "mistyped"}])
def test_a_run_that_moves_none_of_the_chosen_letters_is_an_error_which_a_retry_is_not(
    tmp_path: Path, action: str, choice: dict[str, object]
) -> None:
    run = mended(tmp_path, [7], "manual__letters")
    run.send([8])
    asked = SourceRequest("r", kind=DEAD_LETTERS, letters={"action": action, **choice})
    source = choose_source(run.pipeline, asked)

    def task(try_number: int) -> ProcessTask:
        execution = run.task(try_number=try_number)
        budget = Budget(max_messages=0)
        return ProcessTask(
            run.staged, run.pipeline, execution, run.ports, budget=budget, source=source
        )

    with pytest.raises(RequestRefused, match=r"no dead letters of .*nothing was received"):
        task(1).run()
    assert run.staged.generations() == []
    assert run.dead() == [7]
    # The try before may have moved them
    assert task(2).run().reference["received"] == 0


def test_a_run_whose_letters_have_to_stay_is_an_error_on_every_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = mended(tmp_path, [7], "manual__letters")
    stays = Moved(0, refused={"l-1": "its queue is gone"})
    monkeypatch.setattr(SqliteQueue, "requeue", lambda *_: stays)
    task = ProcessTask(
        run.staged,
        run.pipeline,
        run.task(try_number=2),
        run.ports,
        budget=Budget(),
        source=SOURCE,
    )
    with pytest.raises(RequestRefused, match="l-1 was not moved: its queue is gone"):
        task.run()
