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
from tests.cli_runs import DAG_ID, make_shop
from tests.disk_calls import counted

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOTHING = Held(messages=0, receiving=0, late=(), run_ids=())


@pytest.fixture
def shop(tmp_path, monkeypatch):
    return make_shop(tmp_path, monkeypatch)


@pytest.fixture
def store(tmp_path):
    (tmp_path / "root").mkdir()
    return open_store(f"file://{tmp_path}/root")


def keep(store: Store, run_id: str, **fields: Any) -> RunKey:
    """A run's report in the format of an older release."""
    generation = {"started_at": (NOON - timedelta(minutes=2)).isoformat(), "received": 60}
    report = {
        "totals": {"received": 60, "acked": 57, "dead_lettered": 3, "failed": 6, "lapsed": 0}
        | {"settle_failed": 0},
        "generations": [generation],
        "balanced": True,
        "at": NOON.isoformat(),
        **fields,
    }
    StagedRun(store, pipeline="p", dag_id="d", run_id=run_id).files.replace(
        "report.json", json.dumps(report)
    )
    return RunKey("p", "d", run_id)


def past(**fields: Any) -> PastRun:
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
        **fields,
    )


# -- runs ------------------------------------------------------------------------------------------


def test_history_is_read_from_the_report(shop):
    shop.send([{"n": n, "shop": "a", "void": n == 3} for n in range(4)])
    run = shop.settled_run()
    key = RunKey("Orders", DAG_ID, run.run_id)

    history = past_runs(run.store, [key])[key]

    assert (history.received, history.acked, history.dead_lettered, history.failed) == (4, 3, 1, 1)
    assert (history.balanced, history.trouble, history.source) == (True, "", "")
    assert history.failure_share == 0.25
    assert history.seconds is not None
    assert history.per_minute == pytest.approx(4 * 60 / history.seconds)
    assert history.waited is not None
    assert 0 <= history.waited < 3600


def test_fields_missing_from_an_older_report_are_none(store):
    key = keep(store, "old")

    history = past_runs(store, [key])[key]

    assert (history.seconds, history.per_minute, history.failure_share) == (120.0, 30.0, 0.1)
    assert history.waited is None


def test_empty_run_has_no_rate_and_no_share(store):
    empty = dict.fromkeys(("received", "acked", "dead_lettered", "failed"), 0)
    totals = {**empty, "lapsed": 0, "settle_failed": 0}
    key = keep(store, "empty", totals=totals, generations=[])

    history = past_runs(store, [key])[key]

    assert (history.received, history.started, history.seconds) == (0, None, None)
    assert (history.per_minute, history.failure_share, history.waited) == (None, None, None)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"totals": {}}', "nonsense"])
def test_unreadable_report_is_skipped(store, text):
    key = keep(store, "damaged")
    StagedRun(store, pipeline="p", dag_id="d", run_id="damaged").files.replace("report.json", text)

    assert past_runs(store, [key]) == {}


def test_only_requested_runs_are_read_of_thousands(store, monkeypatch):
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


# -- leased messages -------------------------------------------------------------------------------


def test_leased_messages_are_counted_until_settled(shop):
    shop.send([{"n": n, "shop": "a"} for n in range(5)])
    run, plan = shop.process()
    now = datetime.now(UTC)

    backlog = held_messages(run.store, "Orders", DAG_ID, now)
    assert (backlog.messages, backlog.receiving, backlog.late) == (5, 0, ())
    assert backlog.run_ids == (run.run_id,)

    [record] = run.generations()
    lease = run.lease(record)
    for left, text in ((10, "lapses in 10 s."), (-1, "has lapsed.")):
        late = held_messages(run.store, "Orders", DAG_ID, lease.deadline - timedelta(seconds=left))
        assert late.late == (f"The lease on 5 messages of the run {run.run_id} {text}",)

    shop.handle(run, plan)
    shop.settle(run)
    assert held_messages(run.store, "Orders", DAG_ID, now) == NOTHING


def test_receiving_execution_counts_its_live_counts(shop):
    shop.queue.create()
    run = shop.run("at work")
    lease = shop.load().producer.source(_env()).lease
    run.open_generation(task_id="process", map_index=0, try_number=1, lease=lease)

    backlog = held_messages(run.store, "Orders", DAG_ID, datetime.now(UTC) + timedelta(days=1))

    assert (backlog.messages, backlog.receiving, backlog.late) == (0, 1, ())

    now = datetime.now(UTC)
    live = LiveCounts(at=now, received=12, received_bytes=12, failed=0, batchers={}, deadline=now)
    run.files.replace(paths.live(lease.generation), live.dumps())
    assert held_messages(run.store, "Orders", DAG_ID, now).messages == 12


def _env() -> Any:
    from airflow_broadway.core.custody.producer import ProducerEnv

    return ProducerEnv(generation="0" * 32)


# -- warnings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "leased", "failed", "text"),
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
def test_signs_give_the_reason(runs, leased, failed, text):
    assert [tuple(sign) for sign in signs_of(runs, leased, failed)] == text


def test_long_backlog_and_many_dead_letters_are_signs():
    assert waiting_signs(None, None, "noon") == []
    assert waiting_signs(MANY_DEAD - 1, OLD_BACKLOG - 1, "noon") == []
    assert [sign.sentence for sign in waiting_signs(MANY_DEAD, OLD_BACKLOG, "noon")] == [
        "100 dead letters lie at the broker (as of noon).",
        "The oldest message had waited for 1.0 h (as of noon).",
    ]
