"""The pipelines of a Dag run, from the stored Dag and its task instances."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.models.dag_version import DagVersion
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.sdk import DAG, BaseOperatorLink
from airflow.utils.session import create_session
from airflow.utils.state import DagRunState
from airflow.utils.types import DagRunType
from sqlalchemy import delete, insert, select

from airflow_broadway import Batcher, Broadway, Message
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.plugin.declared import Link, tasks_of_run
from airflow_broadway.producers.sqlite import SqliteProducer
from tests.unit.plugin.dags import stored_dags
from tests.unit.plugin.own_operators import Ack, AllInOne, Batch, Pull, Submit

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


class Plain(Broadway):
    producer = SqliteProducer(queue="plain", path="/nowhere")

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message


class Orders(Plain):
    producer = SqliteProducer(queue="orders", path="/nowhere", concurrency=2)
    batchers = {"big": Batcher(), "small": Batcher(engine="python")}

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


class Console(BaseOperatorLink):
    name = "The console"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return "https://console.test/q"


class Nowhere(Console):
    name = "Nowhere yet"


#: Task → the states of its instances with the seconds of their start and end.
States = Mapping[str, list[tuple[str | None, float | None, float | None]]]


@contextmanager
def known_run(
    dag: DAG, states: States, *, links: Mapping[str, str] | None = None, run_id: str = "manual__1"
) -> Iterator[str]:
    """Stores in Airflow's database the Dag, and a run of it whose tasks are in these states.

    :param links: XCom key → value, of the task ``alone``.
    """
    with stored_dags(dag):
        with create_session() as session:
            wanted = select(DagVersion.id).where(DagVersion.dag_id == dag.dag_id)
            version = session.scalar(wanted.order_by(DagVersion.version_number.desc()).limit(1))
            kind: dict[str, Any] = {"run_type": DagRunType.MANUAL, "state": DagRunState.RUNNING}
            session.add(DagRun(dag_id=dag.dag_id, run_id=run_id, run_after=BEGUN, **kind))
            session.flush()
            rows = [
                {
                    "id": uuid.uuid4(),
                    "dag_id": dag.dag_id,
                    "run_id": run_id,
                    "task_id": task_id,
                    "map_index": index if len(instances) > 1 else -1,
                    "state": state,
                    "try_number": 1,
                    "start_date": None if begun is None else BEGUN + timedelta(seconds=begun),
                    "end_date": None if ended is None else BEGUN + timedelta(seconds=ended),
                    "pool": "default_pool",
                    "dag_version_id": version,
                }
                for task_id, instances in states.items()
                for index, (state, begun, ended) in enumerate(instances)
            ]
            session.execute(insert(TaskInstance), rows)
            session.flush()
            for key, value in (links or {}).items():
                place: Any = {"dag_id": dag.dag_id, "task_id": "alone", "run_id": run_id}
                XComModel.set(key=key, value=value, session=session, **place)
        try:
            yield run_id
        finally:
            with create_session() as session:
                for model in (TaskInstance, DagRun):
                    session.execute(delete(model).where(model.dag_id == dag.dag_id))


def test_run_has_the_pipelines_of_its_dag_with_task_states():
    # Given two pipelines in one Dag, and a task of somebody else
    with DAG("two_pipelines", schedule=None) as dag:
        Orders().task_group("orders", staging="file:///own")
        alone_task = BroadwayRunOperator(task_id="alone", pipeline=Plain(name="Others"))
        alone_task.operator_extra_links = (Console(), Nowhere())
    states: States = {
        "orders.process": [("success", 0, 4), ("running", 1, None)],
        "orders.batch.big": [("success", 5, 6)],
        "orders.batch.small": [(None, None, None)],
        "orders.handle_batches": [("up_for_retry", 6, None)],
        "orders.ack": [("deferred", 0, None)],
        "alone": [("success", 0, 2.5)],
    }

    with known_run(dag, states, links={"_link_Console": "https://console.test/q"}) as run_id:
        known = tasks_of_run("two_pipelines", run_id)

    assert known.going_on
    orders, others = sorted(known.pipelines, key=lambda pipeline: -len(pipeline.tasks))
    assert (orders.name, orders.broker, orders.staging) == ("Orders", "sqlite", "file:///own")
    assert orders.batchers == {"big": "spark", "small": "python"}
    [process] = orders.of_kind("process")
    assert process.state == "running"
    assert process.counts == {"success": 1, "running": 1}
    assert process.seconds is None
    handling = {name: orders.handling_task(name) for name in ("big", "small")}
    ids = {name: task and task.task_id for name, task in handling.items()}
    assert ids == {"big": "orders.handle_batches", "small": "orders.batch.small"}
    assert [task.state for task in orders.of_kind("batch")] == ["success", "none"]
    [alone] = others.tasks
    assert (others.name, alone.kind) == ("Others", "run")
    assert (alone.state, alone.seconds) == ("success", 2.5)
    assert list(alone.links) == [Link("The console", "https://console.test/q", -1)]


def test_own_operators_are_recognized():
    with DAG("own_operators", schedule=None) as dag:
        pull = Pull.partial(task_id="pull", pipeline=Orders()).expand(producer_index=[0, 1])
        big = Batch(task_id="batch.big", pipeline=Orders(), batcher="big", processed=pull.output)
        # The same pipeline, by its name
        submit = Submit(task_id="submit", pipeline=f"{__name__}:Orders", batches=[big.output])
        Ack(task_id="ack", pipeline=Orders(), watch=["pull", "batch.big", "submit"])
        AllInOne(task_id="alone", pipeline=Plain(name="Others"))
        big >> submit
    tasks = ("pull", "batch.big", "submit", "ack", "alone")

    with known_run(dag, {task: [("success", 0, 1)] for task in tasks}) as run_id:
        known = tasks_of_run("own_operators", run_id)

    orders, others = sorted(known.pipelines, key=lambda pipeline: -len(pipeline.tasks))
    kinds = {"pull": "process", "batch.big": "batch", "submit": "spark", "ack": "ack"}
    assert {task.task_id: task.kind for task in orders.tasks} == kinds
    handling = orders.handling_task("big")
    assert handling is not None
    assert handling.task_id == "submit"
    assert [(task.task_id, task.kind) for task in others.tasks] == [("alone", "run")]


def test_unknown_run_has_no_pipelines():
    known = tasks_of_run("nobodys", "manual__1")

    assert (known.state, known.going_on, list(known.pipelines)) == (None, False, [])


def test_run_is_drawn_with_its_dag_version():
    def version(name):
        with DAG("changing", schedule=None) as dag:
            BroadwayRunOperator(task_id=name, pipeline=Plain())
        return dag

    with (
        known_run(version("then"), {"then": [("success", 0, 1)]}, run_id="manual__1"),
        known_run(version("now"), {"now": [("success", 0, 1)]}, run_id="manual__2"),
    ):
        known = [tasks_of_run("changing", run_id) for run_id in ("manual__1", "manual__2")]

    task_ids = [task.task_id for run in known for task in run.pipelines[0].tasks]
    assert task_ids == ["then", "now"]
