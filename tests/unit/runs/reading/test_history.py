"""The last runs of a pipeline, and why people should look at it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.adapters.staging import open_store
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.live import LiveCounts
from airflow_broadway.runs.reading.history import (
    BAD,
    MANY_DEAD,
    OLD_BACKLOG,
    WARN,
    Held,
    PastRun,
    RunKey,
    held_messages,
    past_runs,
    signs_of,
    waiting_signs,
)
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from tests.cli_runs import DAG_ID, Shop, make_shop
from tests.disk_calls import counted

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOTHING = Held(messages=0, receiving=0, late=(), run_ids=())


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    return make_shop(tmp_path, monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "root").mkdir()
    return open_store(f"file://{tmp_path}/root")


def keep(store: Store, run_id: str, **given: Any) -> RunKey:
    """A run's report as a release wrote it that knew less."""
    generation = {"started_at": (NOON - timedelta(minutes=2)).isoformat(), "received": 60}
    report = {
        "totals": {"received": 60, "acked": 57, "dead_lettered": 3, "failed": 6, "lapsed": 0}
        | {"settle_failed": 0},
        "generations": [generation],
        "balanced": True,
        "at": NOON.isoformat(),
        **given,
    }
    StagedRun(store, pipeline="p", dag_id="d", run_id=run_id).files.replace(
        "report.json", json.dumps(report)
    )
    return RunKey("p", "d", run_id)


def past(**given: Any) -> PastRun:
    return replace(
        PastRun(
            run_id="r",
            started=NOON,
            ended=NOON,
            received=100,
            acked=100,
            dead_lettered=0,
            failed=0,
            seconds=60.0,
            per_minute=100.0,
            failure_share=0.0,
            waited=1.0,
            balanced=True,
            trouble="",
            source="",
        ),
        **given,
    )


# -- runs ------------------------------------------------------------------------------------------


def test_a_run_is_told_by_its_report(shop: Shop) -> None:
    shop.send([{"n": n, "shop": "a", "void": n == 3} for n in range(4)])
    run = shop.settled_run()
    key = RunKey("Orders", DAG_ID, run.run_id)

    found = past_runs(run.store, [key])[key]

    assert (found.received, found.acked, found.dead_lettered, found.failed) == (4, 3, 1, 1)
    assert (found.balanced, found.trouble, found.source) == (True, "", "")
    assert found.failure_share == 0.25
    assert found.seconds is not None
    assert found.per_minute == pytest.approx(4 * 60 / found.seconds)
    assert found.waited is not None
    assert 0 <= found.waited < 3600


def test_what_an_older_report_does_not_say_is_not_known(store: Store) -> None:
    key = keep(store, "old")

    found = past_runs(store, [key])[key]

    assert (found.seconds, found.per_minute, found.failure_share) == (120.0, 30.0, 0.1)
    assert found.waited is None


def test_a_run_that_received_nothing_has_no_rate_and_no_share(store: Store) -> None:
    empty = dict.fromkeys(("received", "acked", "dead_lettered", "failed"), 0)
    totals = {**empty, "lapsed": 0, "settle_failed": 0}
    key = keep(store, "empty", totals=totals, generations=[])

    found = past_runs(store, [key])[key]

    assert (found.received, found.started, found.seconds) == (0, None, None)
    assert (found.per_minute, found.failure_share, found.waited) == (None, None, None)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"totals": {}}', "nonsense"])
def test_a_report_that_cannot_be_read_is_no_run(store: Store, text: str) -> None:
    key = keep(store, "damaged")
    StagedRun(store, pipeline="p", dag_id="d", run_id="damaged").files.replace("report.json", text)

    assert past_runs(store, [key]) == {}


def test_of_thousands_of_runs_only_those_asked_for_are_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [keep(store, f"run-{n}") for n in range(3)]
    folder = Path(store.root) / "p" / "d"
    for n in range(2_000):
        (folder / f"older-{n}").mkdir()
    read, listed = counted(monkeypatch, "read"), counted(monkeypatch, "list")

    assert list(past_runs(store, [*keys, RunKey("p", "d", "never ran")])) == keys
    assert (len(read), listed) == (4, [])

    read.clear()
    assert held_messages(store, "p", "d", NOON) == NOTHING
    assert (read, len(listed)) == ([], 1)


# -- what is held ----------------------------------------------------------------------------------


def test_what_is_held_is_counted_until_it_is_settled(shop: Shop) -> None:
    shop.send([{"n": n, "shop": "a"} for n in range(5)])
    run, plan = shop.process()
    now = datetime.now(UTC)

    held = held_messages(run.store, "Orders", DAG_ID, now)
    assert (held.messages, held.receiving, held.late) == (5, 0, ())
    assert held.run_ids == (run.run_id,)

    [record] = run.generations()
    lease = run.lease(record)
    for left, said in ((10, "lapses in 10 s."), (-1, "has lapsed.")):
        late = held_messages(run.store, "Orders", DAG_ID, lease.deadline - timedelta(seconds=left))
        assert late.late == (f"The lease on 5 messages of the run {run.run_id} {said}",)

    shop.handle(run, plan)
    shop.settle(run)
    assert held_messages(run.store, "Orders", DAG_ID, now) == NOTHING


def test_an_execution_that_receives_counts_as_it_last_said(shop: Shop) -> None:
    shop.queue.create()
    run = shop.run("at work")
    lease = shop.load().producer.source(_env()).lease
    run.open_generation(task_id="process", map_index=0, try_number=1, lease=lease)

    held = held_messages(run.store, "Orders", DAG_ID, datetime.now(UTC) + timedelta(days=1))

    assert (held.messages, held.receiving, held.late) == (0, 1, ())

    now = datetime.now(UTC)
    live = LiveCounts(at=now, received=12, received_bytes=12, failed=0, batchers={}, deadline=now)
    run.files.replace(paths.live(lease.generation), live.dumps())
    assert held_messages(run.store, "Orders", DAG_ID, now).messages == 12


def _env() -> Any:
    from airflow_broadway.core.custody.producer import ProducerEnv

    return ProducerEnv(generation="0" * 32)


# -- what needs a look -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "held", "failed", "said"),
    [
        ([past()], NOTHING, None, []),
        ([], None, None, []),
        (
            [past(), past(run_id="older", balanced=False)],
            replace(NOTHING, late=["The lease on …"]),
            None,
            [(BAD, "The lease on …", None), (BAD, "The run older does not balance.", "older")],
        ),
        (
            [past(trouble="3 messages had lapsed", dead_lettered=1_000)],
            None,
            "r",
            [(BAD, "The last run: 3 messages had lapsed.", "r")],
        ),
        ([past()], None, "r", [(WARN, "A task of the last run failed.", "r")]),
        (
            [past()],
            None,
            "later",
            [(BAD, "The last run failed, and was not accounted for.", "later")],
        ),
        (
            [past(dead_lettered=MANY_DEAD, failure_share=0.5)],
            None,
            None,
            [
                (WARN, "100 messages of the last run became dead letters.", "r"),
                (WARN, "50% of the messages of the last run failed.", "r"),
            ],
        ),
        ([past(dead_lettered=MANY_DEAD - 1, failure_share=0.09)], None, None, []),
    ],
)
def test_a_pipeline_that_needs_a_look_says_why(
    runs: list[PastRun], held: Held | None, failed: str | None, said: list[Any]
) -> None:
    assert [tuple(each) for each in signs_of(runs, held, failed)] == said


def test_what_waits_for_long_or_is_dead_needs_a_look_and_what_nobody_knows_does_not() -> None:
    assert waiting_signs(None, None, "noon") == []
    assert waiting_signs(MANY_DEAD - 1, OLD_BACKLOG - 1, "noon") == []
    assert [each.sentence for each in waiting_signs(MANY_DEAD, OLD_BACKLOG, "noon")] == [
        "100 dead letters lie at the broker (as of noon).",
        "The oldest message had waited for 1.0 h (as of noon).",
    ]
