"""A backlog in Airflow: the trigger, the schedule, the sensor, the run that an event starts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.models.trigger import Trigger
from airflow.providers.common.compat.sdk import AirflowSkipException
from airflow.sdk import DAG, Asset
from airflow.sdk.exceptions import TaskDeferred
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.serialization.encoders import encode_trigger
from airflow.triggers.base import BaseEventTrigger

from airflow_broadway import Batcher, Broadway, Message, backlog
from airflow_broadway.adapters import backlog as adapter
from airflow_broadway.adapters.host import Host
from airflow_broadway.adapters.outlets import emit_outlet_events
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import ConnectionMissing, OptionsError
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.producers import RabbitMQProducer, SqliteProducer, SqliteQueue
from airflow_broadway.runs.backlog.crossings import Runs
from airflow_broadway.runs.outcomes import event_extra
from airflow_broadway.sensors.backlog import BroadwayBacklogSensor
from airflow_broadway.triggers.backlog import (
    BroadwayBacklogReachedTrigger,
    BroadwayBacklogTrigger,
)
from tests.unit.operators.context import task_context


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", conn_id="orders_queue")

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message


class Batched(Orders):
    batchers = {
        "kept": Batcher(engine="python", outlets=["s3://lake/kept"]),
        "thrown": Batcher(engine="python", outlets=["s3://lake/thrown", "s3://lake/all"]),
    }

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_batcher("thrown" if message.data == b"old" else "kept")

    def handle_batch(self, batcher: str, messages: Any, info: Any, context: Any) -> Any:
        return [m.failed("no") if m.data == b"bad" else m for m in messages]


class OnSpark(Orders):
    batchers = {"default": Batcher(schema="n long", batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data({"n": 1})

    def handle_batch(self, batcher: str, messages: Any, info: Any, context: Any) -> Any:
        raise AssertionError("Spark's")


class Sharded(Broadway):
    producer = RabbitMQProducer(queue="orders", conn_id="rabbit", on_failure="retry")

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteQueue]:
    """The queue that the connection names; the staging root is beside it."""
    connection = {"conn_type": "broadway_sqlite", "host": str(tmp_path / "queue.db")}
    monkeypatch.setenv("AIRFLOW_CONN_ORDERS_QUEUE", json.dumps(connection))
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{tmp_path}/staging")
    with SqliteQueue(tmp_path / "queue.db", "orders") as queue:
        yield queue


async def told_by(trigger: Any, number: int) -> list[dict[str, Any]]:
    """The payloads of its first events."""
    found: list[dict[str, Any]] = []
    async for event in trigger.run():
        found.append(event.payload)
        if len(found) == number:
            break
    return found


# -- the trigger ---------------------------------------------------------------------------------


def test_the_trigger_looks_takes_nothing_and_tells(
    queue: SqliteQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_broadway.triggers.backlog.count_runs", lambda _: Runs(0, 0))
    queue.send([b"1", b"2", b"3"])
    trigger = BroadwayBacklogTrigger(Orders, dag_id="orders", min_messages=3)

    [told] = asyncio.run(told_by(again(trigger), 1))

    assert (told["pipeline"], told["ready"]) == ("Orders", 3)
    assert set(told) == {
        *("pipeline", "reason", "at", "crossing", "told"),
        *("ready", "delayed", "leased", "dead", "oldest_age"),
    }
    assert queue.depth()[:4] == (3, 0, 0, 0)


def again(trigger: Any) -> Any:
    """The trigger as a triggerer makes it of what was stored."""
    path, kwargs = trigger.serialize()
    assert path == f"{type(trigger).__module__}.{type(trigger).__qualname__}"
    return type(trigger)(**kwargs)


def test_what_is_stored_of_a_trigger_has_no_credentials_and_is_the_same_each_time(
    queue: SqliteQueue, tmp_path: Path
) -> None:
    trigger = BroadwayBacklogTrigger(Orders, dag_id="orders", min_messages=3, max_age=60)
    stored = encode_trigger(trigger)
    row = Trigger(classpath=stored["classpath"], kwargs=stored["kwargs"])

    # Else Airflow would take it for another each time that it parses the Dag, and start it anew
    first = BaseEventTrigger.hash(stored["classpath"], stored["kwargs"])
    assert first == BaseEventTrigger.hash(row.classpath, row.kwargs)
    # The file of the queue is the connection's to say
    assert "orders_queue" in stored["kwargs"]["queues"]
    assert str(tmp_path) not in json.dumps(stored)


@pytest.mark.parametrize("kind", ["event", "sensor"])
def test_a_connection_that_is_missing_ends_no_trigger(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("AIRFLOW_CONN_ORDERS_QUEUE", raising=False)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if seconds == 8.0:
            raise asyncio.CancelledError

    monkeypatch.setattr("airflow_broadway.triggers.backlog.asyncio.sleep", sleep)
    bounds: dict[str, Any] = {"min_messages": 3, "poke_interval": 1.0}
    trigger: Any = BroadwayBacklogTrigger(Orders, dag_id="orders", **bounds)
    if kind == "sensor":
        trigger = BroadwayBacklogReachedTrigger(queues=trigger.queues, dag_id="orders", **bounds)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(told_by(trigger, 1))

    assert waits[-3:] == [2.0, 4.0, 8.0]
    assert "'orders_queue' is not defined" in caplog.text


def test_a_broker_that_does_not_answer_leaves_the_loop_free() -> None:
    answer = threading.Event()

    async def both() -> str:
        look = asyncio.ensure_future(adapter.run_in_thread(lambda: answer.wait(30.0)))
        await asyncio.sleep(0)  # the loop goes on
        assert not look.done()
        answer.set()
        return "answered" if await look else "never"

    assert asyncio.run(both()) == "answered"


@pytest.mark.parametrize("kind", ["event", "sensor"])
def test_each_trigger_looks_in_a_thread_of_its_own(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def look(*_: Any, **__: Any) -> QueueDepth:
        threads.append(threading.current_thread().name)
        return QueueDepth(3, 0, 0, 0, None)

    monkeypatch.setattr("airflow_broadway.triggers.backlog.look_at", look)
    monkeypatch.setattr("airflow_broadway.triggers.backlog.count_runs", lambda _: Runs(0, 0))
    trigger: Any = BroadwayBacklogTrigger(Orders, dag_id="orders", min_messages=3)
    if kind == "sensor":
        trigger = BroadwayBacklogReachedTrigger(
            queues=trigger.queues, dag_id="orders", min_messages=3, poke_interval=0.001
        )

    asyncio.run(told_by(trigger, 1))

    assert threads == ["broadway-backlog"]


def test_what_a_look_raises_is_the_callers_and_a_cancelled_one_ends_in_silence() -> None:
    async def failing() -> None:
        with pytest.raises(ZeroDivisionError):
            await adapter.run_in_thread(lambda: 1 / 0)

    asyncio.run(failing())
    answer = threading.Event()
    troubles: list[Any] = []

    def slow() -> None:
        answer.wait(30.0)

    async def cancelled() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: troubles.append(about))
        look = asyncio.ensure_future(adapter.run_in_thread(slow))
        await asyncio.sleep(0)
        look.cancel()
        with pytest.raises(asyncio.CancelledError):
            await look
        answer.set()
        looks = [each for each in threading.enumerate() if each.name == "broadway-backlog"]
        assert looks  # beside the first one, which may be about to end
        for thread in looks:
            await asyncio.to_thread(thread.join, 30.0)
        await asyncio.sleep(0)

    asyncio.run(cancelled())
    assert troubles == []


def test_what_another_release_has_stored_ends_its_own_trigger_and_no_triggerer() -> None:
    kwargs = BroadwayBacklogTrigger(Orders, dag_id="orders", min_messages=3).serialize()[1]
    # Made in the triggerer's own loop, which nothing but a TypeError leaves alone
    trigger = BroadwayBacklogTrigger(**{**kwargs, "min_messages": "many"})
    with pytest.raises(OptionsError):
        asyncio.run(told_by(trigger, 1))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, r"'Backlog\.min_messages' not found"),
        ({"min_messages": 1, "max_runs": 0}, r"BroadwayBacklogTrigger\.max_runs': expected a posi"),
        ({"min_messages": 1, "dag_id": ""}, r"BroadwayBacklogTrigger\.dag_id': expected a non-e"),
        ({"min_messages": 1, "pipeline": 5}, r"pipeline': expected a Broadway subclass"),
        ({"max_age": 60, "pipeline": Sharded}, r"max_age': expected min_messages as well: rabb"),
    ],
)
def test_each_option_of_the_trigger_is_checked_while_a_dag_is_parsed(
    given: dict[str, Any], error: str
) -> None:
    with pytest.raises(OptionsError, match=error):
        BroadwayBacklogTrigger(**{"pipeline": Orders, "dag_id": "orders", **given})


def test_a_run_that_is_queued_counts_as_one_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def count(dag_id: str, states: list[str] | None = None) -> int:
        asked.append((dag_id, states))
        return 7 if states is None else len(states)

    monkeypatch.setattr(RuntimeTaskInstance, "get_dr_count", staticmethod(count))
    assert adapter.count_runs("orders") == Runs(open=2, ever=7)
    # One that is made between both is open: else nothing would say that it was made
    assert asked == [("orders", None), ("orders", ["queued", "running"])]


# -- the schedule --------------------------------------------------------------------------------


def test_a_dag_runs_by_its_backlog_in_one_line() -> None:
    dag = Orders.dag("orders", schedule=backlog(min_messages=5, max_age=60), max_active_runs=3)

    asset = dag.schedule
    assert isinstance(asset, Asset)
    assert asset.name == "orders.Orders.backlog"
    [watcher] = asset.watchers
    stored = watcher.trigger.serialize()[1]
    assert {name: value for name, value in stored.items() if name != "queues"} == {
        "dag_id": "orders",
        "min_messages": 5,
        "max_age": 60,
        "max_runs": 3,
        "poke_interval": 30.0,
        "staging": None,
    }


def test_a_queue_whose_name_is_a_template_is_refused_as_a_schedule() -> None:
    with pytest.raises(OptionsError, match=r"producer\.queue': expected no template"):
        Orders(producer={"queue": "{{ ds }}"}).dag("orders", schedule=backlog(min_messages=5))


# -- the sensor ----------------------------------------------------------------------------------


def sensor(**given: Any) -> BroadwayBacklogSensor:
    return BroadwayBacklogSensor(
        task_id="wait", pipeline=Orders, **{"min_messages": 2, "poke_interval": 5.0, **given}
    )


def test_a_sensor_pokes_until_the_backlog_has_reached_its_bounds(queue: SqliteQueue) -> None:
    queue.send([b"1"])
    assert not sensor().poke(task_context()).is_done
    queue.send([b"2"])
    found: Any = sensor().poke(task_context())
    assert found.is_done
    assert found.xcom_value["reason"] == "2 messages (min_messages=2)"
    assert queue.depth().ready == 2


@pytest.mark.parametrize("deferrable", [False, True])
def test_a_look_that_fails_fails_the_sensor(
    deferrable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIRFLOW_CONN_ORDERS_QUEUE", raising=False)
    with pytest.raises(ConnectionMissing, match="'orders_queue' is not defined"):
        sensor(deferrable=deferrable).execute(task_context())


def test_a_deferrable_sensor_defers_to_a_trigger_of_the_same_bounds(queue: SqliteQueue) -> None:
    waiting = sensor(deferrable=True, timeout=600.0)
    with pytest.raises(TaskDeferred) as deferred:
        waiting.execute(task_context())

    trigger, timeout = deferred.value.trigger, deferred.value.timeout
    assert isinstance(trigger, BroadwayBacklogReachedTrigger)
    assert timeout == timedelta(seconds=600)
    assert (trigger.min_messages, trigger.max_age, trigger.poke_interval) == (2, None, 5.0)

    queue.send([b"1", b"2"])
    trigger.poke_interval = 0.001
    [told] = asyncio.run(told_by(again(trigger), 1))
    assert waiting.resume(task_context(), told)["ready"] == 2
    # and what is there at once is not deferred
    found: Any = waiting.execute(task_context())
    assert found["ready"] == 2


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"min_messages": None}, r"'Backlog\.min_messages' not found"),
        ({"poke_interval": 0}, r"Backlog\.poke_interval': expected a number of seconds"),
        ({"min_messages": None, "max_age": 5, "pipeline": Sharded}, r"Backlog\.max_age': expected"),
        ({"pipeline": "no_such_module:Orders", "min_messages": -1}, r"Backlog\.min_messages"),
    ],
)
def test_each_option_of_the_sensor_is_checked_while_a_dag_is_parsed(
    given: dict[str, Any], error: str
) -> None:
    with pytest.raises(OptionsError, match=error):
        BroadwayBacklogSensor(**{"task_id": "w", "pipeline": Orders, "min_messages": 2, **given})


# -- the run -------------------------------------------------------------------------------------


def started_by(at: str, run_id: str, *, try_number: int = 1, others: bool = False) -> Any:
    """The context of a run that an event started."""
    told = {"at": at, "crossing": at, "reason": "3 messages (min_messages=3)"}
    events = [SimpleNamespace(extra={"from_trigger": True, "payload": told})]
    if others:
        events.append(SimpleNamespace(extra={}))
    context = task_context(run_id)
    context["ti"].try_number = try_number
    context["triggering_asset_events"] = {"asset": events}
    return context


@pytest.mark.parametrize("operator", [BroadwayProcessorOperator, BroadwayRunOperator])
def test_a_second_run_of_one_crossing_takes_nothing_and_says_why(
    queue: SqliteQueue, operator: Any
) -> None:
    task = operator(task_id="process", pipeline=Orders, idle_seconds=0.0)
    queue.send([b"1", b"2", b"3"])
    assert task.execute(started_by("2026-01-01T00:00:00+00:00", "one"))["received"] == 3
    queue.send([b"4"])

    with pytest.raises(AirflowSkipException, match=r"3 messages.*The run one began at .*drained"):
        task.execute(started_by("2026-01-01T00:00:01+00:00", "two"))

    assert queue.depth()[:4] == (1, 0, 0, 0)
    # Cleared, or started by something else too, it works as ever; so does one of a later event
    assert task.execute(started_by("2026-01-01T00:00:01+00:00", "two", try_number=2))["received"]
    queue.send([b"5"])
    other = started_by("2026-01-01T00:00:01+00:00", "three", others=True)
    assert task.execute(other)["received"] == 1
    assert task.execute(started_by("2999-01-01T00:00:00+00:00", "four"))["received"] == 0


def test_from_the_event_to_the_acked_message(
    queue: SqliteQueue, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Given an event of the trigger that Airflow made of the Dag's schedule
    monkeypatch.setattr("airflow_broadway.triggers.backlog.count_runs", lambda _: Runs(0, 0))
    schedule: Any = Orders.dag("orders", schedule=backlog(min_messages=3)).schedule
    queue.send([b"1", b"2", b"3"])
    [told] = asyncio.run(told_by(again(schedule.watchers[0].trigger), 1))

    # When the run that it starts is at work
    context = started_by("", "one")
    context["triggering_asset_events"]["asset"][0].extra["payload"] = told
    task = BroadwayProcessorOperator(task_id="process", pipeline=Orders, idle_seconds=0.0)
    assert task.execute(context)["received"] == 3

    # Then they are acked
    assert queue.depth()[:4] == (0, 0, 0, 0)
    assert "started by a backlog: 3 messages (min_messages=3)." in capfd.readouterr().out


# -- outlets -------------------------------------------------------------------------------------


def test_a_batchers_outlets_are_those_of_the_task_that_handles_its_batches() -> None:
    with DAG("d", schedule=None) as dag:
        Batched.task_group("g", batch={"outlets": [Asset("given")]})
    names = {t.task_id: [each.name for each in t.outlets] for t in dag.tasks}
    assert names["g.batch.kept"] == ["given", "s3://lake/kept"]
    assert names["g.batch.thrown"] == ["given", "s3://lake/thrown", "s3://lake/all"]
    assert names["g.process"] == names["g.ack"] == []


def test_an_outlets_event_has_counts_and_batch_ids(queue: SqliteQueue) -> None:
    queue.send([b"good", b"bad"])
    process = BroadwayProcessorOperator(task_id="process", pipeline=Batched, idle_seconds=0.0)
    reference = process.execute(task_context("one"))
    kept = Asset("s3://lake/kept")
    task = BroadwayBatcherOperator(
        task_id="batch", pipeline=Batched, batcher="kept", processed=[reference], outlets=[kept]
    )
    context: Any = {**task_context("one"), "outlet_events": {kept: SimpleNamespace(extra={})}}

    task.execute(context)

    extra = context["outlet_events"][kept].extra
    [batch_id] = extra.pop("batch_ids")
    assert batch_id
    assert extra == {
        "pipeline": "Batched",
        "batches": 1,
        "successful": 1,
        "failed": 1,
        "batch_ids_left_out": 0,
    }
    assert task.outlets == [kept]


def test_an_outlet_of_several_batchers_has_one_event_of_what_is_its_own(
    queue: SqliteQueue,
) -> None:
    # Given batches of two batchers, as one task of Spark handles them
    queue.send([b"good", b"bad", b"old", b"old"])
    process = BroadwayProcessorOperator(task_id="process", pipeline=Batched, idle_seconds=0.0)
    reference = process.execute(task_context("one"))
    run = Host(task_context("one")).open_run(None, Batched())
    heads = []
    for name in Batched.batchers:
        task = BroadwayBatcherOperator(
            task_id=name, pipeline=Batched, batcher=name, processed=[reference]
        )
        heads.append(BatchPlan.read(run.files, task.execute(task_context("one"))["plan"])[0])

    # When that tells of outlets: the batchers' own, and one that it was given
    names = ["s3://lake/kept", "s3://lake/thrown", "s3://lake/all", "given"]
    outlets = [Asset(name) for name in names]
    events = {outlet: SimpleNamespace(extra={}) for outlet in outlets}
    operator: Any = SimpleNamespace(outlets=outlets)
    context: Any = {"outlet_events": events}
    emit_outlet_events(operator, context, run, Batched(), heads)

    # Then each has what its batchers' batches came to
    extras = {outlet.name: event.extra for outlet, event in events.items()}
    counts = {
        name: (extra["batches"], extra["successful"], extra["failed"], len(extra["batch_ids"]))
        for name, extra in extras.items()
    }
    assert counts == {
        "s3://lake/kept": (1, 1, 1, 1),
        "s3://lake/thrown": (1, 2, 0, 1),
        "s3://lake/all": (1, 2, 0, 1),
        "given": (2, 3, 1, 2),
    }


def test_an_event_has_no_more_ids_than_a_database_likes() -> None:
    outcomes: Any = [
        SimpleNamespace(batch_id=f"b{number}", successful=1, failed=0) for number in range(1_200)
    ]
    extra = event_extra("p", outcomes)
    assert (extra["batches"], len(extra["batch_ids"]), extra["batch_ids_left_out"]) == (
        1_200,
        1_000,
        200,
    )


def test_an_outlet_of_which_nothing_succeeded_has_no_event(
    queue: SqliteQueue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.send([b"bad"])
    process = BroadwayProcessorOperator(task_id="process", pipeline=Batched, idle_seconds=0.0)
    reference = process.execute(task_context("one"))
    task = BroadwayBatcherOperator(
        task_id="batch",
        pipeline=Batched,
        batcher="kept",
        processed=[reference],
        outlets=[Asset("other")],
    )
    context: Any = {**task_context("one"), "outlet_events": {}}
    task.execute(context)
    assert task.outlets == []
    assert "The outlets ['s3://lake/kept'] are declared by batchers" in caplog.text


def test_a_task_that_leaves_its_batches_to_spark_tells_of_no_outlet(
    queue: SqliteQueue, capfd: pytest.CaptureFixture[str]
) -> None:
    queue.send([b"1"])
    pipeline = OnSpark()
    process = BroadwayProcessorOperator(task_id="process", pipeline=pipeline, idle_seconds=0.0)
    task = BroadwayBatcherOperator(
        task_id="batch",
        pipeline=pipeline,
        batcher="default",
        processed=[process.execute(task_context("one"))],
        outlets=[Asset("given")],
    )
    context: Any = {**task_context("one"), "outlet_events": {}}

    assert task.execute(context)["batches"] == 1

    assert task.outlets == []
    assert "Spark handles the batches of 'default'" in capfd.readouterr().out


@pytest.mark.parametrize("outlets", ["s3://lake", [""], [5], ["{{ ds }}"]])
def test_outlets_are_checked_while_a_dag_is_parsed(outlets: Any) -> None:
    with pytest.raises(OptionsError, match=r"Batcher\.outlets': expected"):
        Batcher(outlets=outlets)


def test_a_run_without_staging_refuses_outlets_of_batchers() -> None:
    with pytest.raises(
        OptionsError, match=r"batchers\.kept\.outlets': expected none with Broadway"
    ):
        BroadwayRunOperator(task_id="run", pipeline=Batched)
