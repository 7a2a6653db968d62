"""The sweep of a process task releases messages of dead runs, and none of others."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.errors import ProducerUnavailable, StagingError
from airflow_broadway.core.formats import paths
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.runs.metrics import Metric, MetricSink
from airflow_broadway.testing import ManualClock
from tests.unit.runs.steps import AS_AIRFLOW, Run, Sums, balanced


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, numbers=range(1, 7))


def test_running_run_keeps_its_messages(run):
    run.process(max_messages=3)
    Run(run.folder, "manual__2", create=False).process(max_messages=2)

    Run(run.folder, "manual__3", create=False, finished=["manual__2"]).sweep()

    assert run.depth() == (3, 0, 3, 0)


def test_mapped_task_ignores_its_siblings(run):
    run.process(0, max_messages=2)
    run.process(1, max_messages=2)

    run.sweep(1)

    assert run.depth() == (4, 0, 2, 0)


def test_second_sweep_has_nothing_to_do(run, monkeypatch):
    run.process(max_messages=3)
    run.sweep()

    monkeypatch.setattr(SqliteQueue, "settle", None)  # which nobody calls

    run.sweep()
    assert run.depth() == (6, 0, 0, 0)


def test_failed_release_is_retried_by_the_next_execution(run, monkeypatch):
    # Given a dead try, and a queue that refuses to take its messages back
    run.process(max_messages=3)
    settle = SqliteQueue.settle
    monkeypatch.setattr(SqliteQueue, "settle", _away)
    run.sweep()
    assert run.depth() == (3, 0, 3, 0)

    # When it is back, the next execution gives them back
    monkeypatch.setattr(SqliteQueue, "settle", settle)
    reference = run.process(try_number=2)

    assert reference["received"] == 6


def test_messages_of_another_queue_are_left_to_their_lease(run):
    # Given a run whose producer was then pointed elsewhere
    run.process(max_messages=3)
    with SqliteQueue(run.folder / "queue.db", "other") as other:
        other.send([b"1"])
    later = run.next()
    later.pipeline = Sums(
        producer={"path": str(run.folder / "queue.db"), "queue": "other"},
        context={"calls": run.calls_path},
    )

    reference = later.process()

    assert reference["received"] == 1
    assert run.depth() == (3, 0, 3, 0)


def test_generation_that_never_received_is_closed(run):
    # Given a process task that died between opening its generation and receiving
    from airflow_broadway.core.errors import LeaseLapsed

    env = run.env("f" * 32, {"task_id": "process", "map_index": 0})
    source = run.pipeline.producer.source(env)
    run.staged.open_generation(task_id="process", map_index=0, try_number=1, lease=source.lease)

    run.sweep()

    # Then its zombie receives nothing
    with pytest.raises(LeaseLapsed):
        source.receive(5, timeout=0.0)
    source.close()
    assert balanced(run.ack())


@pytest.mark.parametrize("newer", ["manifest", "plan", "outcome", "lease", "record"])
def test_sweep_releases_nothing_written_by_a_newer_release(run, caplog, newer):
    # A run that is over, one of whose files has a newer format
    reference = run.process(max_messages=3)
    run.batch(reference)
    files, generation = run.staged.files, reference["generation"]
    [plan] = (path for path in Path(files.full("batches")).rglob("plan.jsonl"))
    [outcome] = (path for path in Path(files.full("outcomes")).rglob("*.json"))
    path = {
        "manifest": Path(files.full(paths.manifest(generation))),
        "plan": plan,
        "outcome": outcome,
        "lease": Path(files.full(paths.lease(generation))),
        "record": Path(run.staged.dag.full(f"_open/{generation}.json")),
    }[newer]
    head, *rest = path.read_text().splitlines()
    value = {**json.loads(head), "version": 99, "release": "0.7.0", "new": 1}
    path.write_text("\n".join([json.dumps(value), *rest]))

    # The next run leaves it alone, and names the release to use
    run.next().sweep()

    assert run.depth() == (3, 0, 3, 0)
    assert "format version 99" in caplog.text
    assert "use airflow-broadway 0.7.0" in caplog.text
    assert "Settled the dead generation" not in caplog.text


# -- two Airflows, one staging root ----------------------------------------------------------------


def test_run_of_another_airflow_is_skipped_until_its_lease_lapses(run, caplog):
    # A run at work in one Airflow, and a run in another, which does not know the first
    blue = Run(run.folder, "blue", airflow="blue")
    reference = blue.process(max_messages=3)
    green = Run(run.folder, "green", airflow="green", finished=["blue"])
    green.staged.clock = clock = ManualClock(SystemClock().now())

    # The second takes what is ready, reports the first, and settles none of its messages
    assert green.process()["received"] == 3
    assert run.depth() == (0, 0, 6, 0)
    assert "Run blue of another Airflow ('blue', host" in caplog.text
    assert f"generation {reference['generation']}: they are skipped until" in caplog.text
    blue.batch(reference)
    assert blue.ack()["totals"]["accounted"] == 3

    # Once the lease has lapsed by the clock of the sweeping run, its messages are settled
    later = Run(run.folder, "blue-2", airflow="blue")
    later.send([8, 9])
    assert later.process()["received"] == 2
    clock.advance(1_800.0)  # far behind what a busy machine may take until here
    next_green = Run(run.folder, "green-2", airflow="green")
    next_green.staged.clock = clock
    next_green.sweep()
    assert run.depth()[:3] == (2, 0, 3)


def test_two_airflows_with_one_run_id_do_not_share_its_folder(run):
    # Both have a run scheduled__1; the first has received
    blue, green = (Run(run.folder, "scheduled__1", airflow=name) for name in ("blue", "green"))
    reference = blue.process(max_messages=3)

    # The process task of the second refuses before it receives
    with pytest.raises(
        StagingError, match=r"another Airflow \('blue', host .* this one is 'green'"
    ):
        green.process()
    assert run.depth() == (3, 0, 3, 0)

    # and its sensor settles nothing of the first, nor renews it
    assert green.ack()["totals"]["received"] == 0
    green.watcher().renew()
    assert run.depth() == (3, 0, 3, 0)
    assert blue.batch(reference)
    assert blue.ack()["totals"]["accounted"] == 3

    # Once all is settled, the second may receive
    assert green.process(max_messages=1)["received"] == 1


def _away(*_: object, **__: object) -> None:
    raise ProducerUnavailable("no answer") from sqlite3.OperationalError("locked")


class Counts(MetricSink):
    """Keeps the counters."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()

    def count(self, name: str, count: int, tags: Mapping[str, str]) -> None:
        self.sums[name] += count


def test_dead_letters_of_a_dead_run_are_counted_by_the_next(tmp_path):
    # Given a run whose messages have outcomes, and whose sensor was never there
    first = Run(tmp_path, "manual__1")
    first.send(range(1, 16))  # 7, 14 and 5, 10, 15 fail
    first.batch(first.process())

    # When the next run's process task settles them
    counts = Counts()
    ports = replace(AS_AIRFLOW, metrics=counts)
    Run(tmp_path, "manual__2", finished=["manual__1"], ports=ports).sweep()

    # Then the metric that a rule goes by has them
    assert counts.sums[Metric.DEAD_LETTERED] == 5
