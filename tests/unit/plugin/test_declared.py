"""The pipelines that Dags declare are read from Airflow's stored Dags."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization

from airflow_broadway import Batcher, Broadway
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.plugin import declared as reading
from airflow_broadway.plugin.declared import declared_in, declared_pipelines
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.sensors.backlog import BroadwayBacklogSensor
from tests.unit.plugin.dags import stored_dags
from tests.unit.plugin.own_operators import Ack, AllInOne, Pull

ME = f"{__name__}:Orders"


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", path="/tmp/orders.db", concurrency=2)
    batchers = {"default": Batcher(engine="python"), "late": Batcher(engine="python")}

    def handle_message(self, processor: str, message: Any, context: Any) -> Any:
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


def stored(dag: DAG) -> dict[str, Any]:
    """A Dag as Airflow's database has it."""
    value: dict[str, Any] = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    return value


def test_pipeline_is_declared_with_its_topology():
    dag = Orders(context={"to": "{{ params.to }}"}).dag("orders", params={"to": "here"})

    [pipeline] = declared_in("orders", stored(dag))

    assert (pipeline.name, pipeline.path, pipeline.broker) == ("Orders", ME, "sqlite")
    assert (pipeline.producers, pipeline.batchers) == (2, {"default": "python", "late": "python"})
    assert pipeline.staging is None


def test_each_pipeline_of_a_dag_is_found():
    with DAG("shop", schedule=None) as dag:
        Orders(name="first").task_group("first", staging="file:///elsewhere")
        Orders(name="second").task_group("second")
        BroadwayRunOperator(task_id="third", pipeline=Orders(name="third"))

    pipelines = declared_in("shop", stored(dag))

    roots = {pipeline.name: pipeline.staging for pipeline in pipelines}
    assert roots == {"first": "file:///elsewhere", "second": None, "third": None}


def test_own_operators_are_found():
    # Given subclasses of our operators in a module of somebody's, one of them mapped
    with DAG("shop", schedule=None) as dag:
        Pull(task_id="one", pipeline=Orders(name="first"), team="a")
        Pull.partial(task_id="two", pipeline=Orders(name="second"), staging="file:///x").expand(
            producer_index=[0, 1]
        )
        AllInOne(task_id="three", pipeline="no_such_shop.orders:Late")
        # Whoever looks after the same pipelines receives nothing of them
        Ack(task_id="ack", pipeline=Orders(name="third"), watch=["one"])
        BroadwayBacklogSensor(task_id="look", pipeline=Orders(name="fourth"), min_messages=1)

    pipelines = declared_in("shop", stored(dag))

    assert {(p.name, p.broker, p.staging) for p in pipelines} == {
        ("first", "sqlite", None),
        ("second", "sqlite", "file:///x"),
        ("Late", None, None),
    }


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("no_such_shop.orders:Late", "Late"),
        ({"class": "no_such_shop.orders:Late", "options": {"name": "later"}}, "later"),
    ],
)
def test_class_declared_as_text_is_not_loaded(reference, name):
    with DAG("shop", schedule=None) as dag:
        BroadwayProcessorOperator(task_id="process", pipeline=reference)

    [pipeline] = declared_in("shop", stored(dag))

    assert (pipeline.name, pipeline.broker, pipeline.batchers) == (name, None, None)


def test_foreign_dags_have_none_and_truncated_fields_are_skipped():
    other = {"__type": "operator", "__var": {"task_id": "a", "_task_module": "airflow.x"}}
    cut = {"task_id": "b", "_task_module": "airflow_broadway.operators.run", "pipeline": "{'cl…"}

    assert declared_in("d", {"dag": {"tasks": [other, {"__var": cut, "__type": "operator"}]}}) == []


# -- Airflow's database ----------------------------------------------------------------------------


def test_dag_is_read_once_until_it_changes(monkeypatch):
    read: list[str] = []

    def counted(dag_id, dag):
        read.append(dag_id)
        return declared_in(dag_id, dag)

    monkeypatch.setattr(reading, "declared_in", counted)
    with stored_dags(Orders().dag("declared_a"), Orders(name="b").dag("declared_b")) as store:
        ours = {"declared_a", "declared_b"}
        for _ in range(2):
            declared = [(pipeline.dag_id, pipeline.name) for pipeline in declared_pipelines(ours)]
            assert declared == [("declared_a", "Orders"), ("declared_b", "b")]
        assert {pipeline.dag_id for pipeline in declared_pipelines()} >= ours
        assert [dag_id for dag_id in read if dag_id in ours] == ["declared_a", "declared_b"]

        store(Orders(name="other").dag("declared_a"), is_paused=True)
        [changed] = declared_pipelines({"declared_a"})
        assert (changed.name, changed.paused) == ("other", True)

        store(Orders(name="other").dag("declared_a"), is_stale=True)
        assert declared_pipelines({"declared_a"}) == []
