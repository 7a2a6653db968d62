"""Where a run's messages come from: by its type, its params, its operator; and its budgets."""

from __future__ import annotations

import json
import re
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import DAG, AirflowFailException

from airflow_broadway.adapters.host import Host
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.pipeline_options import Archive
from airflow_broadway.core.model.run_source import Interval, RunSource
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.operators.pull import budget_of, source_of_run
from airflow_broadway.pipeline import Broadway
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.runs.sources.choice import PARAMS
from tests.unit.runs.steps import Sums

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
HOUR = Interval(NOON, NOON + timedelta(hours=1))


class Handles(Broadway):
    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message


class Queue(Handles):
    producer = SqliteProducer(queue="q")


class Kept(Queue):
    archive = Archive()


class Log(Handles):
    producer = KafkaProducer(group_id="g", topics=["t"])


class KeptLog(Log):
    archive = Archive()


def context(
    run_type: str, interval: tuple[datetime | None, datetime | None] = HOUR, **params: Any
) -> Any:
    start, end = interval
    run = SimpleNamespace(
        run_type=run_type, run_id="r", data_interval_start=start, data_interval_end=end
    )
    ti = SimpleNamespace(dag_id="d", run_id="r", task_id="process", map_index=-1, try_number=1)
    return {"dag_run": run, "ti": ti, "params": {"max_messages": 5, **params}}


def chosen(pipeline: type[Broadway], run_context: Any, **arguments: Any) -> RunSource:
    operator = BroadwayProcessorOperator(task_id="process", pipeline=pipeline, **arguments)
    return source_of_run(operator, Host(run_context), pipeline())


def test_runs_read_the_queue_and_backfills_the_archive_or_log():
    live, archive = RunSource(), RunSource(kind="archive", interval=HOUR)
    for pipeline in (Queue, Kept, Log, KeptLog):
        assert chosen(pipeline, context("scheduled")) == live
    assert chosen(Kept, context("backfill")) == archive
    assert chosen(KeptLog, context("backfill")) == archive
    assert chosen(Log, context("backfill")) == RunSource(kind="log", interval=HOUR)


def test_catching_up_schedule_reads_intervals_if_configured():
    source = chosen(Kept, context("scheduled"), source="archive")

    assert source == RunSource(kind="archive", interval=HOUR)


def test_params_precede_the_operator_and_that_the_run_type():
    two = Interval(NOON - timedelta(days=1), NOON)
    params: Any = {
        "interval_start": "2026-01-30T13:00:00+01:00",
        "interval_end": "2026-01-31T12:00:00",
    }

    assert chosen(KeptLog, context("backfill", source="log")).kind == "log"
    assert chosen(KeptLog, context("backfill"), source="log").kind == "log"
    assert chosen(KeptLog, context("manual", source="archive", **params), source="live") == (
        RunSource(kind="archive", interval=two)
    )
    assert chosen(Queue, context("manual", source="run", source_run="past")) == (
        RunSource(kind="run", run_id="past")
    )
    two_of_it = context("manual", source="run", source_run="past", source_batches=["a", "b"])
    assert chosen(Queue, two_of_it).only == {"batches": ["a", "b"]}
    assert chosen(Queue, context("manual", source="dead_letters")).kind == "dead_letters"


@pytest.mark.parametrize(
    ("pipeline", "run_context", "error"),
    [
        (Queue, context("backfill"), "the producer 'sqlite' reads a live queue.*archive ="),
        (Queue, context("manual", source="archive"), "'Queue' has no archive to read"),
        (Queue, context("manual", source="log"), "'sqlite' has no log to read an interval of"),
        (Kept, context("backfill", source="live"), "its source is set to the live queue"),
        (Kept, context("backfill", (None, None)), "is a backfill without a data interval"),
        (Kept, context("backfill", (NOON, NOON)), "is a backfill without a data interval"),
        (Kept, context("manual", (None, None), source="archive"), "is without an interval"),
        (
            Kept,
            context("manual", source="archive", interval_start="noon"),
            "not an ISO 8601 timestamp",
        ),
        (Kept, context("manual", interval_end="2026-01-01"), "set source to 'archive' or 'log'"),
        (Kept, context("manual", source_run="past"), "set source to 'run', or leave source_run"),
        (Kept, context("manual", source="run"), "source_run is missing"),
        (Kept, context("manual", source_batches=["a"]), "or leave source_batches out"),
        (
            Kept,
            context("manual", source="run", source_batches="a"),
            "is not a list of strings: 'a'",
        ),
        (Kept, context("manual", source="run", source_run="r"), "its own batches again: clear"),
        (Kept, context("manual", source="memory"), "the source 'memory' is not one of"),
    ],
)
def test_unavailable_source_is_refused_before_receiving(pipeline, run_context, error):
    with pytest.raises(AirflowFailException, match=error):
        chosen(pipeline, run_context)


def test_unknown_source_is_refused_at_parse():
    with pytest.raises(OptionsError, match=r"process\.source.*one of \['archive', "):
        BroadwayProcessorOperator(task_id="process", pipeline=Kept, source="memory")


def test_archive_without_its_client_is_refused_at_parse(monkeypatch):
    monkeypatch.setattr("airflow_broadway.adapters.parsing.find_spec", lambda name: None)
    BroadwayProcessorOperator(task_id="process", pipeline=Queue)

    with pytest.raises(OptionsError, match=r"'archive'.*deltalake is not installed.*\[delta\]"):
        BroadwayProcessorOperator(task_id="process", pipeline=Kept)


def test_past_sources_ignore_budgets():
    operator = BroadwayProcessorOperator(task_id="process", pipeline=Sums, max_bytes=7)
    run_context, source = context("backfill"), RunSource(kind="archive", interval=HOUR)

    assert budget_of(operator, Host(run_context), source) == Budget()
    log = RunSource(kind="log", interval=HOUR)
    assert budget_of(operator, Host(run_context), log) == Budget(idle_seconds=1.0)
    assert budget_of(operator, Host(run_context)).max_messages == 5
    assert budget_of(operator, Host(run_context), RunSource(kind="dead_letters")).max_messages == 5
    limited = BroadwayProcessorOperator(
        task_id="process", pipeline=Sums, execution_timeout=timedelta(seconds=100)
    )
    assert budget_of(limited, Host(run_context), source).max_seconds == 80.0


@pytest.mark.parametrize(("guide", "count"), [("backfills", 3), ("dead-letters", 3)])
def test_airflow_accepts_the_documented_commands(guide, count):
    from airflow.cli.cli_parser import get_parser

    text = (Path(__file__).parents[3] / "docs" / f"{guide}.md").read_text("utf-8")
    commands = re.findall(r"^airflow (.*)$", text, re.MULTILINE)

    assert len(commands) == count
    for command in commands:
        arguments = get_parser().parse_args(shlex.split(command))
        if arguments.subcommand == "create":
            assert arguments.reprocess_behavior in (None, "none", "completed", "failed")
            assert arguments.from_date < arguments.to_date
        else:
            assert json.loads(arguments.conf).keys() <= {*Kept.params(), *PARAMS}


def test_dead_letters_of_an_unknown_pipeline_refuse_the_run():
    def choose(dag, name):
        letters = {"pipeline": name, "action": "delete"}
        task_context = context("manual", source="dead_letters", dead_letters=letters)
        task_context["dag"] = dag
        operator: Any = dag.task_dict["process"]
        return source_of_run(operator, Host(task_context), Queue())

    with DAG("letters") as dag:
        BroadwayProcessorOperator(task_id="process", pipeline=Queue)
        BroadwayProcessorOperator.partial(task_id="mapped", pipeline=Kept).expand(
            producer_index=[0, 1]
        )
        assert choose(dag, "Queue").kind == "dead_letters"
        assert choose(dag, "Kept").kind == "live"
        with pytest.raises(AirflowFailException, match=r"are \['Kept', 'Queue'\]: correct the"):
            choose(dag, "Renamed")

        # The name of a class that is passed as text is unknown
        BroadwayProcessorOperator(task_id="text", pipeline="shop.unloaded:Renamed")
        assert choose(dag, "Renamed").kind == "live"
