"""A backlog in Airflow: the trigger, the schedule, the sensor, the run that an event starts."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import timedelta
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
from airflow_broadway.adapters.outlets import emit_outlet_events, outlets_of
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
from airflow_broadway.sinks import DeltaTable, ParquetFolder, PostgresTable
from airflow_broadway.triggers.backlog import BroadwayBacklogReachedTrigger, BroadwayBacklogTrigger
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


class Committed(Orders):
    batchers = {"default": Batcher(engine="python", sink=ParquetFolder(path="/replaced"))}

    def handle_batch(self, batcher: str, messages: Any, info: Any, context: Any) -> Any:
        return [{"text": message.data.decode()} for message in messages]


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
def queue(tmp_path, monkeypatch):
    """The queue that the connection names; the staging root is next to it."""
    connection = {"conn_type": "broadway_sqlite", "host": str(tmp_path / "queue.db")}
    monkeypatch.setenv("AIRFLOW_CONN_ORDERS_QUEUE", json.dumps(connection))
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{tmp_path}/staging")
    with SqliteQueue(tmp_path / "queue.db", "orders") as queue:
        yield queue


def first_event(trigger: Any) -> dict[str, Any]:
    """The payload of its first event."""

    async def first() -> dict[str, Any]:
        event = await anext(trigger.run())
        payload: dict[str, Any] = event.payload
        return payload

    return asyncio.run(first())


def processed(pipeline: Any) -> dict[str, Any]:
    """The reference of a process task in the run ``one``."""
    process = BroadwayProcessorOperator(task_id="process", pipeline=pipeline, idle_seconds=0.0)
    return process.execute(task_context("one"))


def batcher_task(batcher: str, pipeline: Any, reference: Any, *outlets: Asset) -> Any:
    return BroadwayBatcherOperator(
        task_id="batch",
        pipeline=pipeline,
        batcher=batcher,
        processed=[reference],
        outlets=list(outlets),
    )


# -- the trigger ---------------------------------------------------------------------------------


def test_trigger_reports_the_backlog_and_takes_nothing(queue, monkeypatch):
    monkeypatch.setattr("airflow_broadway.triggers.backlog.count_runs", lambda _: Runs(0, 0))
    queue.send([b"1", b"2", b"3"])
    trigger = BroadwayBacklogTrigger(Orders, dag_id="orders", min_messages=3)

    event = first_event(again(trigger))

    assert (event["pipeline"], event["ready"]) == ("Orders", 3)
    assert set(event) == {
        *("pipeline", "reason", "at", "crossing", "reports"),
        *("ready", "delayed", "leased", "dead", "oldest_age"),
    }
    assert queue.depth()[:4] == (3, 0, 0, 0)


def again(trigger: Any) -> Any:
    """The trigger as stored and loaded by a triggerer."""
    path, kwargs = trigger.serialize()
    assert path == f"{type(trigger).__module__}.{type(trigger).__qualname__}"
    return type(trigger)(**kwargs)


def test_stored_trigger_is_stable_and_has_no_credentials(queue, tmp_path):
    trigger = BroadwayBacklogTrigger(Orders, dag_id="orders", min_messages=3, max_age=60)
    stored = encode_trigger(trigger)
    row = Trigger(classpath=stored["classpath"], kwargs=stored["kwargs"])

    # Otherwise Airflow would restart it whenever it parses the Dag
    first = BaseEventTrigger.hash(stored["classpath"], stored["kwargs"])
    assert first == BaseEventTrigger.hash(row.classpath, row.kwargs)
    # The path is resolved from the connection
    assert "orders_queue" in stored["kwargs"]["queues"]
    assert str(tmp_path) not in json.dumps(stored)


@pytest.mark.parametrize("kind", ["event", "sensor"])
def test_missing_connection_ends_no_trigger(kind, monkeypatch, caplog):
    monkeypatch.delenv("AIRFLOW_CONN_ORDERS_QUEUE", raising=False)
    waits: list[float] = []

    async def sleep(seconds):
        waits.append(seconds)
        if seconds == 8.0:
            raise asyncio.CancelledError

    monkeypatch.setattr("airflow_broadway.triggers.backlog.asyncio.sleep", sleep)
    bounds: dict[str, Any] = {"min_messages": 3, "poke_interval": 1.0}
    trigger: Any = BroadwayBacklogTrigger(Orders, dag_id="orders", **bounds)
    if kind == "sensor":
        trigger = BroadwayBacklogReachedTrigger(queues=trigger.queues, dag_id="orders", **bounds)

    with pytest.raises(asyncio.CancelledError):
        first_event(trigger)

    assert waits[-3:] == [2.0, 4.0, 8.0]
    assert "'orders_queue' is not defined" in caplog.text


def test_unresponsive_broker_leaves_the_loop_free():
    answer = threading.Event()

    async def both():
        look = asyncio.ensure_future(adapter.run_in_thread(lambda: answer.wait(30.0)))
        await asyncio.sleep(0)  # the loop goes on
        assert not look.done()
        answer.set()
        return "answered" if await look else "never"

    assert asyncio.run(both()) == "answered"


@pytest.mark.parametrize("kind", ["event", "sensor"])
def test_each_trigger_looks_in_its_own_thread(kind, monkeypatch):
    threads: list[str] = []

    def look(*_, **__):
        threads.append(threading.current_thread().name)
        return QueueDepth(3, 0, 0, 0, None)

    monkeypatch.setattr("airflow_broadway.triggers.backlog.look_at", look)
    monkeypatch.setattr("airflow_broadway.triggers.backlog.count_runs", lambda _: Runs(0, 0))
    trigger: Any = BroadwayBacklogTrigger(Orders, dag_id="orders", min_messages=3)
    if kind == "sensor":
        trigger = BroadwayBacklogReachedTrigger(
            queues=trigger.queues, dag_id="orders", min_messages=3, poke_interval=0.001
        )

    first_event(trigger)

    assert threads == ["broadway-backlog"]


def test_error_of_a_look_reaches_the_caller_and_cancellation_is_silent():
    async def failing():
        with pytest.raises(ZeroDivisionError):
            await adapter.run_in_thread(lambda: 1 / 0)

    asyncio.run(failing())
    answer = threading.Event()
    troubles: list[Any] = []

    def slow():
        answer.wait(30.0)

    async def cancelled():
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: troubles.append(context)
        )
        look = asyncio.ensure_future(adapter.run_in_thread(slow))
        await asyncio.sleep(0)
        look.cancel()
        with pytest.raises(asyncio.CancelledError):
            await look
        answer.set()
        looks = [t for t in threading.enumerate() if t.name == "broadway-backlog"]
        assert looks  # next to the first one, which may be about to end
        for thread in looks:
            await asyncio.to_thread(thread.join, 30.0)
        await asyncio.sleep(0)

    asyncio.run(cancelled())
    assert troubles == []


def test_trigger_stored_by_another_release_ends_alone():
    kwargs = BroadwayBacklogTrigger(Orders, dag_id="orders", min_messages=3).serialize()[1]
    # Made in the triggerer's own loop, which nothing but a TypeError leaves alone
    trigger = BroadwayBacklogTrigger(**{**kwargs, "min_messages": "many"})
    with pytest.raises(OptionsError):
        first_event(trigger)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, r"'Backlog\.min_messages' not found"),
        ({"min_messages": 1, "max_runs": 0}, r"BroadwayBacklogTrigger\.max_runs': expected a posi"),
        ({"min_messages": 1, "dag_id": ""}, r"BroadwayBacklogTrigger\.dag_id': expected a non-e"),
        ({"min_messages": 1, "pipeline": 5}, r"pipeline': expected a Broadway subclass"),
        ({"max_age": 60, "pipeline": Sharded}, r"max_age': expected min_messages as well: rabb"),
    ],
)
def test_trigger_options_are_checked_at_parse(options, error):
    with pytest.raises(OptionsError, match=error):
        BroadwayBacklogTrigger(**{"pipeline": Orders, "dag_id": "orders", **options})


def test_queued_run_counts_as_active(monkeypatch):
    requests: list[Any] = []

    def count(dag_id, states=None):
        requests.append((dag_id, states))
        return 7 if states is None else len(states)

    monkeypatch.setattr(RuntimeTaskInstance, "get_dr_count", staticmethod(count))
    assert adapter.count_runs("orders") == Runs(open=2, ever=7)
    # A run that is created between both counts as open
    assert requests == [("orders", None), ("orders", ["queued", "running"])]


# -- the schedule --------------------------------------------------------------------------------


def test_backlog_starts_a_dag_of_one_task():
    dag = Orders.dag("orders", schedule=backlog(min_messages=5), run={"max_messages": 7})

    [task] = dag.tasks
    assert (type(task), task.task_id, task.retries) == (BroadwayRunOperator, "run", 2)
    assert task.max_messages == 7
    [watcher] = dag.schedule.watchers
    assert watcher.trigger.min_messages == 5
    with pytest.raises(OptionsError, match=r"dag\.ack.*no value with run"):
        Orders.dag("orders", run={}, ack={})


def test_backlog_schedules_a_dag_in_one_line():
    dag = Orders.dag("orders", schedule=backlog(min_messages=5, max_age=60), max_active_runs=3)

    asset = dag.schedule
    assert isinstance(asset, Asset)
    assert asset.name == "orders.Orders.backlog"
    [watcher] = asset.watchers
    stored = watcher.trigger.serialize()[1]
    del stored["queues"]
    bounds = {"min_messages": 5, "max_age": 60, "max_runs": 3, "poke_interval": 30.0}
    assert stored == {"dag_id": "orders", "staging": None, **bounds}


def test_templated_queue_name_is_refused_as_a_schedule():
    with pytest.raises(OptionsError, match=r"producer\.queue': expected no template"):
        Orders(producer={"queue": "{{ ds }}"}).dag("orders", schedule=backlog(min_messages=5))


# -- the sensor ----------------------------------------------------------------------------------


def sensor(**options: Any) -> BroadwayBacklogSensor:
    return BroadwayBacklogSensor(
        task_id="wait", pipeline=Orders, **{"min_messages": 2, "poke_interval": 5.0, **options}
    )


def test_sensor_pokes_until_the_backlog_reaches_its_bounds(queue):
    queue.send([b"1"])
    assert not sensor().poke(task_context()).is_done
    queue.send([b"2"])
    result: Any = sensor().poke(task_context())
    assert result.is_done
    assert result.xcom_value["reason"] == "2 messages (min_messages=2)"
    assert queue.depth().ready == 2


@pytest.mark.parametrize("deferrable", [False, True])
def test_failed_look_fails_the_sensor(deferrable, monkeypatch):
    monkeypatch.delenv("AIRFLOW_CONN_ORDERS_QUEUE", raising=False)
    with pytest.raises(ConnectionMissing, match="'orders_queue' is not defined"):
        sensor(deferrable=deferrable).execute(task_context())


def test_deferrable_sensor_defers_to_a_trigger_with_the_same_bounds(queue):
    waiting = sensor(deferrable=True, timeout=600.0)
    with pytest.raises(TaskDeferred) as deferred:
        waiting.execute(task_context())

    trigger, timeout = deferred.value.trigger, deferred.value.timeout
    assert isinstance(trigger, BroadwayBacklogReachedTrigger)
    assert timeout == timedelta(seconds=600)
    assert (trigger.min_messages, trigger.max_age, trigger.poke_interval) == (2, None, 5.0)

    queue.send([b"1", b"2"])
    trigger.poke_interval = 0.001
    event = first_event(again(trigger))
    assert waiting.resume(task_context(), event)["ready"] == 2
    # and what is there at once is not deferred
    result: Any = waiting.execute(task_context())
    assert result["ready"] == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"min_messages": None}, r"'Backlog\.min_messages' not found"),
        ({"poke_interval": 0}, r"Backlog\.poke_interval': expected a number of seconds"),
        ({"min_messages": None, "max_age": 5, "pipeline": Sharded}, r"Backlog\.max_age': expected"),
        ({"pipeline": "no_such_module:Orders", "min_messages": -1}, r"Backlog\.min_messages"),
    ],
)
def test_sensor_options_are_checked_at_parse(options, error):
    with pytest.raises(OptionsError, match=error):
        BroadwayBacklogSensor(**{"task_id": "w", "pipeline": Orders, "min_messages": 2, **options})


# -- the run -------------------------------------------------------------------------------------


def started_by(at: str, run_id: str, *, try_number: int = 1, others: bool = False) -> Any:
    """The context of a run that an event started."""
    event = {"at": at, "crossing": at, "reason": "3 messages (min_messages=3)"}
    events = [SimpleNamespace(extra={"from_trigger": True, "payload": event})]
    if others:
        events.append(SimpleNamespace(extra={}))
    context = task_context(run_id)
    context["ti"].try_number = try_number
    context["triggering_asset_events"] = {"asset": events}
    return context


@pytest.mark.parametrize("operator", [BroadwayProcessorOperator, BroadwayRunOperator])
def test_second_run_of_one_crossing_is_skipped(queue, operator):
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


def test_event_leads_to_acked_messages(queue, monkeypatch, capfd):
    # Given an event of the trigger that Airflow made of the Dag's schedule
    monkeypatch.setattr("airflow_broadway.triggers.backlog.count_runs", lambda _: Runs(0, 0))
    schedule: Any = Orders.dag("orders", schedule=backlog(min_messages=3)).schedule
    queue.send([b"1", b"2", b"3"])
    event = first_event(again(schedule.watchers[0].trigger))

    # When the run that it starts is at work
    context = started_by("", "one")
    context["triggering_asset_events"]["asset"][0].extra["payload"] = event
    task = BroadwayProcessorOperator(task_id="process", pipeline=Orders, idle_seconds=0.0)
    assert task.execute(context)["received"] == 3

    # Then they are acked
    assert queue.depth()[:4] == (0, 0, 0, 0)
    assert "started by a backlog: 3 messages (min_messages=3)." in capfd.readouterr().out


# -- outlets -------------------------------------------------------------------------------------


def test_batcher_outlets_belong_to_the_task_that_handles_batches():
    with DAG("d", schedule=None) as dag:
        Batched.task_group("g", batch={"outlets": [Asset("passed")]})
    names = {t.task_id: [outlet.name for outlet in t.outlets] for t in dag.tasks}
    assert names["g.batch.kept"] == ["passed", "s3://lake/kept"]
    assert names["g.batch.thrown"] == ["passed", "s3://lake/thrown", "s3://lake/all"]
    assert names["g.process"] == names["g.ack"] == []


@pytest.mark.parametrize(
    ("sink", "asset"),
    [
        (ParquetFolder(path="/lake/orders"), "file:///lake/orders"),
        (ParquetFolder(path="/lake/{{ ds }}"), None),
        (DeltaTable(path="s3://lake/orders/"), "s3://lake/orders"),
        (PostgresTable(table="sales.orders"), "x-postgres://postgres_default/sales/orders"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sink_of_a_batcher_is_an_outlet(sink: Any, asset: str | None) -> None:
    outlets = outlets_of(Committed(batchers={"default": {"sink": sink}}), ["default"])
    assert [outlet.uri for outlet in outlets] == ([asset] if asset else [])


@pytest.mark.parametrize("own", [[], ["orders"]])
def test_own_outlets_replace_that_of_the_sink(own: list[str]) -> None:
    outlets = outlets_of(Committed(batchers={"default": {"outlets": own}}), ["default"])
    assert [outlet.name for outlet in outlets] == own


def test_event_of_a_sink_has_counts(queue: Any, tmp_path: Any) -> None:
    queue.send([b"good", b"old"])
    lake = Asset(f"file://{tmp_path}/lake")
    pipeline = Committed(batchers={"default": {"sink": {"path": f"{tmp_path}/lake"}}})
    task = batcher_task("default", pipeline, processed(pipeline), lake)
    context: Any = {**task_context("one"), "outlet_events": {lake: SimpleNamespace(extra={})}}

    task.execute(context)

    assert context["outlet_events"][lake].extra["successful"] == 2


def test_outlet_event_has_counts_and_batch_ids(queue):
    queue.send([b"good", b"bad"])
    kept = Asset("s3://lake/kept")
    task = batcher_task("kept", Batched, processed(Batched), kept)
    context: Any = {**task_context("one"), "outlet_events": {kept: SimpleNamespace(extra={})}}

    task.execute(context)

    extra = context["outlet_events"][kept].extra
    [batch_id] = extra.pop("batch_ids")
    assert batch_id
    counts = {"batches": 1, "successful": 1, "failed": 1, "batch_ids_left_out": 0}
    assert extra == {"pipeline": "Batched", **counts}
    assert task.outlets == [kept]


def test_shared_outlet_sums_its_batchers(queue):
    # Given batches of two batchers, as one task of Spark handles them
    queue.send([b"good", b"bad", b"old", b"old"])
    reference = processed(Batched)
    run = Host(task_context("one")).open_run(None, Batched())
    heads = []
    for name in Batched.batchers:
        task = batcher_task(name, Batched, reference)
        heads.append(BatchPlan.read(run.files, task.execute(task_context("one"))["plan"])[0])

    # When it emits events of the batchers' outlets, and of one of its own
    names = ["s3://lake/kept", "s3://lake/thrown", "s3://lake/all", "passed"]
    outlets = [Asset(name) for name in names]
    events = {outlet: SimpleNamespace(extra={}) for outlet in outlets}
    operator: Any = SimpleNamespace(outlets=outlets)
    context: Any = {"outlet_events": events}
    emit_outlet_events(operator, context, run, Batched(), heads)

    # Then all have the counts of their batchers
    extras = {outlet.name: event.extra for outlet, event in events.items()}
    counts = {
        name: (extra["batches"], extra["successful"], extra["failed"], len(extra["batch_ids"]))
        for name, extra in extras.items()
    }
    assert counts == {
        "s3://lake/kept": (1, 1, 1, 1),
        "s3://lake/thrown": (1, 2, 0, 1),
        "s3://lake/all": (1, 2, 0, 1),
        "passed": (2, 3, 1, 2),
    }


def test_outlet_event_bounds_its_batch_ids():
    ids = [f"b{number}" for number in range(1_200)]
    outcomes: Any = [SimpleNamespace(batch_id=id_, successful=1, failed=0) for id_ in ids]
    extra = event_extra("p", outcomes)
    assert (extra["batches"], len(extra["batch_ids"])) == (1_200, 1_000)
    assert extra["batch_ids_left_out"] == 200


def test_outlet_without_success_has_no_event(queue, caplog):
    queue.send([b"bad"])
    task = batcher_task("kept", Batched, processed(Batched), Asset("other"))
    context: Any = {**task_context("one"), "outlet_events": {}}
    task.execute(context)
    assert task.outlets == []
    assert "The outlets ['s3://lake/kept'] are declared by batchers" in caplog.text


def test_batcher_task_for_spark_emits_no_outlet_event(queue, capfd):
    queue.send([b"1"])
    pipeline = OnSpark()
    task = batcher_task("default", pipeline, processed(pipeline), Asset("passed"))
    context: Any = {**task_context("one"), "outlet_events": {}}

    assert task.execute(context)["batches"] == 1

    assert task.outlets == []
    assert "Spark handles the batches of 'default'" in capfd.readouterr().out


@pytest.mark.parametrize("outlets", ["s3://lake", [""], [5], ["{{ ds }}"]])
def test_outlets_are_checked_at_parse(outlets):
    with pytest.raises(OptionsError, match=r"Batcher\.outlets': expected"):
        Batcher(outlets=outlets)


def test_unstaged_run_refuses_batcher_outlets():
    with pytest.raises(
        OptionsError, match=r"batchers\.kept\.outlets': expected none with Broadway"
    ):
        BroadwayRunOperator(task_id="run", pipeline=Batched)
