"""Parse-time checks of operators."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization

from airflow_broadway import Broadway
from airflow_broadway.core.errors import OptionsError, PipelineError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.reference import load_ref, make_ref
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.sensors.ack import BroadwayAckSensor
from tests.unit.passing import Passing


class Orders(Passing):
    producer = SqliteProducer(queue="orders", path="/nowhere/orders.db", lease=40.0)
    batchers = {"small": Batcher(engine="python"), "large": Batcher(schema="price double")}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_batcher("small")


class Documented(Orders):
    """A pipeline of shop orders.

    By the minute.
    """


class PythonOrders(Orders):
    batchers = {"small": Batcher(engine="python")}


def test_task_group_has_a_task_per_stage_and_the_ack_sensor():
    dag = Orders.dag("orders")

    names = ("process", "batch.small", "batch.large", "handle_batches", "ack")
    ids = {f"broadway.{name}" for name in names}
    assert set(dag.task_ids) == ids
    assert dag.get_task("broadway.handle_batches").upstream_task_ids == {"broadway.batch.large"}
    # All of them before it, whose trigger rule lets it start with the run.
    ack = dag.get_task("broadway.ack")
    assert ack.upstream_task_ids == ids - {"broadway.ack"}
    assert (ack.trigger_rule, [leaf.task_id for leaf in dag.leaves]) == ("always", ["broadway.ack"])


def test_each_task_documents_what_it_does_and_what_clearing_does():
    dag = Orders.dag("orders")

    docs = {task.task_id.removeprefix("broadway."): task.doc_md or "" for task in dag.tasks}
    assert [name for name, text in docs.items() if "**Clear it" not in text] == []
    assert "`handle_message`" in docs["process"]  # a mapped one, too
    assert "`handle_batch`" in docs["handle_batches"]
    assert len(set(docs.values())) == 4
    alone = BroadwayRunOperator(task_id="run", pipeline=PythonOrders, doc_md="Ours.")
    assert alone.doc_md == "Ours."
    assert "this one task" in (
        BroadwayRunOperator(task_id="run", pipeline=PythonOrders).doc_md or ""
    )


def test_dag_shows_the_docstring_of_its_own_pipeline():
    assert Documented.dag("documented").doc_md == "A pipeline of shop orders.\n\nBy the minute."
    assert Documented.dag("documented", doc_md="Ours.").doc_md == "Ours."
    assert Orders.dag("orders").doc_md is None


def test_batcher_may_have_its_own_application():
    dag = Orders(batchers={"large": {"own_application": True}}).dag("orders")

    assert "broadway.handle_batches.large" in dag.task_ids
    assert "broadway.handle_batches" not in dag.task_ids


def test_arguments_reach_the_tasks_of_their_kind():
    dag = Orders.dag(
        "orders",
        process={"pool": "pull", "max_messages": 7},
        batch={"pool": "batch"},
        spark={"conn_id": "spark_prod", "executor_memory": "4g"},
        ack={"pool": "ack", "hold_failed": 60.0},
        default_args={"retries": 5, "owner": "shop"},
    )

    assert dag.get_task("broadway.batch.small").pool == "batch"
    assert dag.get_task("broadway.ack").pool == "ack"
    assert dag.get_task("broadway.process").partial_kwargs["pool"] == "pull"
    assert dag.get_task("broadway.process").partial_kwargs["max_messages"] == 7
    assert {dag.get_task(f"broadway.{name}").retries for name in ("ack", "handle_batches")} == {5}


def test_tasks_are_retried_twice_after_ten_seconds_by_default():
    default, other = Orders.dag("orders"), Orders.dag("other", default_args={"retries": 0})

    for dag, retries in ((default, 2), (other, 0)):
        for task in dag.tasks:
            kwargs = getattr(task, "partial_kwargs", None) or vars(task)
            assert (kwargs["retries"], kwargs["retry_delay"]) == (retries, timedelta(seconds=10))


def test_dag_has_one_run_at_a_time_without_catchup_by_default():
    dag, other = Orders.dag("orders"), Orders.dag("other", max_active_runs=3, catchup=True)

    assert (dag.schedule, dag.max_active_runs, dag.catchup) == (None, 1, False)
    assert (other.max_active_runs, other.catchup) == (3, True)
    assert set(dag.params) == set(Orders.params())


class Fixed(SqliteProducer):
    renews = False


@pytest.mark.parametrize(
    ("lease", "arguments", "limit"),
    [
        (300.0, {}, r"process\.max_seconds \(300 s\)"),
        (300.1, {}, None),
        (60.0, {"process": {"max_seconds": 60.0}}, r"process\.max_seconds \(60 s\)"),
        (60.1, {"process": {"max_seconds": 60.0}}, None),
        (3600.0, {"dagrun_timeout": timedelta(hours=1)}, r"dagrun_timeout \(3600 s\)"),
        (3600.1, {"dagrun_timeout": timedelta(hours=1)}, None),
        (60.0, {"run": {"max_seconds": 60.0}}, r"run\.max_seconds \(60 s\)"),
        (60.1, {"run": {"max_seconds": 60.0}}, None),
    ],
)
def test_non_renewable_lease_must_outlast_the_run(lease, arguments, limit):
    class FixedOrders(PythonOrders):
        producer = Fixed(queue="orders", path="/nowhere/orders.db", lease=lease)

    # So that a worker could import it
    FixedOrders.__qualname__ = "PythonOrders"
    with nullcontext() if limit is None else pytest.raises(OptionsError, match=limit):
        FixedOrders.dag("orders", **arguments)


@pytest.mark.parametrize("operator", [BroadwayProcessorOperator, BroadwayRunOperator])
def test_mapped_operator_stores_only_the_class_reference(operator):
    with DAG("mapped", schedule=None) as dag:
        operator.partial(task_id="pull", pipeline=PythonOrders).expand(producer_index=[0, 1])

    text = json.dumps(DagSerialization.to_dict(dag))

    assert "PythonOrders" in text
    assert "def handle_message" not in text
    assert " at 0x" not in text


@pytest.mark.parametrize("operator", [BroadwayProcessorOperator, BroadwayRunOperator])
def test_producer_index_defaults_to_none(operator):
    assert operator(task_id="all", pipeline=PythonOrders).producer_index is None
    assert operator(task_id="one", pipeline=PythonOrders, producer_index=0).producer_index == 0


def test_task_carries_facts_about_its_pipeline():
    dag = PythonOrders(name="shop").dag("orders")

    batchers = dict.fromkeys(PythonOrders().batchers, "python")
    known = {"name": "shop", "broker": "sqlite", "producers": 1, "batchers": batchers}
    assert dag.get_task("broadway.process").partial_kwargs["pipeline"]["about"] == known
    assert dag.get_task("broadway.ack").pipeline["about"] == known
    # Nothing is loaded for it.
    unknown = BroadwayProcessorOperator(task_id="late", pipeline="no_such_shop:Orders")
    assert "about" not in unknown.pipeline


def test_templates_in_overrides_are_rendered_later():
    dag = PythonOrders(producer={"queue": "orders-{{ var.value.env }}"}).dag("orders")

    stored = dag.get_task("broadway.process").partial_kwargs["pipeline"]
    assert stored["options"] == {"producer": {"queue": "orders-{{ var.value.env }}"}}


def declared(kind: Any, task_id: str, **options: Any) -> Callable[[], object]:
    return lambda: kind(task_id=task_id, **{"pipeline": PythonOrders, **options})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: PythonOrders(batchers={"small": {"batch_sise": 5}}),
            "unknown option 'batchers.small.batch_sise' (value 5), valid options are: [",
        ),
        (
            lambda: PythonOrders(producer={"lease": "long"}),
            "invalid value for option 'producer.lease': expected a number of seconds greater than"
            " 0, got: 'long'",
        ),
        (lambda: PythonOrders(batchers={"smal": {}}), "did you mean 'small'?"),
        (
            declared(BroadwayProcessorOperator, "p", max_messages=0),
            "option 'p.max_messages': expected a positive integer or None, got: 0",
        ),
        (
            declared(BroadwayProcessorOperator, "p", max_seconds=None),
            "invalid value for option 'p.max_seconds': expected a limit here or for max_messages",
        ),
        (
            declared(BroadwayProcessorOperator, "p", pipeline="no colon"),
            "invalid value for option 'pipeline': expected a Broadway subclass",
        ),
        (declared(BroadwayBatcherOperator, "b", batcher="smal", processed=None), "mean 'small'?"),
        (
            declared(BroadwayAckSensor, "a", watch=[]),
            "invalid value for option 'a.watch': expected a list of task ids, got: []",
        ),
        (
            declared(BroadwayAckSensor, "a", watch=["p"], poke_interval=30.0),
            "expected at most half of the producer's lease (40 s), which it renews, got: 30.0",
        ),
        (
            declared(BroadwayAckSensor, "a", watch=["p"], hold_failed=-1.0),
            "invalid value for option 'a.hold_failed'",
        ),
        (
            declared(BroadwayAckSensor, "a", watch="p"),
            "invalid value for option 'a.watch': expected a list of task ids, got: 'p'",
        ),
        (
            declared(BroadwayAckSensor, "ack", watch=["p"], fail_when=1.0),
            "'ack.fail_when': expected 'all', 'never', a number",
        ),
        (
            lambda: PythonOrders.dag("orders", spark={"conn_id": "spark"}),
            "invalid value for option 'spark': expected no arguments, since no batcher uses Spark",
        ),
    ],
)
def test_invalid_declaration_is_one_clear_error_at_parse(make, text):
    with pytest.raises(OptionsError) as caught:
        make()

    assert text in str(caught.value)


def test_two_pipelines_of_a_dag_need_two_names():
    with DAG("orders"):
        PythonOrders().task_group("eu")
        with pytest.raises(OptionsError, match=r"'eu\.ack' in the same Dag.*'PythonOrders_us'"):
            PythonOrders(producer={"queue": "us"}).task_group("us")
    with DAG("orders_of_two") as dag:
        PythonOrders().task_group("eu")
        PythonOrders(producer={"queue": "us"}, name="us").task_group("us")
    assert {"eu.ack", "us.ack"} <= set(dag.task_ids)


def test_unstaged_run_refuses_a_spark_batcher_at_parse():
    with pytest.raises(PipelineError, match=r"batchers \['large'\] of 'Orders' run on Spark"):
        BroadwayRunOperator(task_id="run", pipeline=Orders)
    with pytest.raises(PipelineError, match=r"or run the pipeline's task group"):
        BroadwayRunOperator.partial(task_id="run", pipeline=Orders)


def test_local_class_is_refused():
    class Local(PythonOrders):
        pass

    with pytest.raises(OptionsError, match="a class at the top level of an importable module"):
        Local.dag("local")


def test_spark_pipeline_in_a_dag_file_is_refused_with_the_fix(
    monkeypatch,
):
    name = "unusual_prefix_0123456789abcdef_orders"
    monkeypatch.setitem(sys.modules, name, sys.modules[__name__])
    monkeypatch.setattr(Orders, "__module__", name)

    with pytest.raises(OptionsError, match=r"move the class Orders to a module of its own"):
        Orders.dag("orders")


def test_python_pipeline_of_a_dag_file_is_referenced_by_file_name(monkeypatch):
    name = "unusual_prefix_0123456789abcdef_orders"
    monkeypatch.setitem(sys.modules, name, sys.modules[__name__])
    monkeypatch.setattr(PythonOrders, "__module__", name)

    reference = make_ref(PythonOrders())

    assert reference["class"] == "dag-file/orders:PythonOrders"
    assert isinstance(load_ref(reference), PythonOrders)


def test_structural_option_cannot_be_a_template():
    for option in ("engine", "own_application"):
        with pytest.raises(OptionsError, match=rf"batchers\.late\.{option}.*no template"):
            Templated(batchers={"late": {option: "{{ var.value.x }}"}})


def test_python_batcher_has_no_own_application():
    with pytest.raises(OptionsError, match=r"own_application.*only Spark batchers run in an app"):
        Batcher(engine="python", own_application=True)
    with pytest.raises(OptionsError, match=r"batchers\.late\.own_application.*only Spark batchers"):
        Templated(batchers={"late": {"own_application": True}})


def test_invalid_schema_names_its_batcher():
    class Shop(Templated):
        batchers = {"large": Batcher(schema="n bigint"), "small": Batcher(schema="n bigin")}

    wrong = r"'batchers\.small\.schema': expected Spark DDL \(.*did you mean 'bigint'"
    with pytest.raises(OptionsError, match=wrong):
        Shop()
    # A template is checked once it is rendered.
    ref = make_ref(Rendered(batchers={"small": {"schema": "{{ var.value.x }}"}}))
    for schema in ("n int", "n bigin"):
        ref["options"] = {"batchers": {"small": {"schema": schema}}}
        with nullcontext() if schema == "n int" else pytest.raises(OptionsError, match=wrong):
            load_ref(ref)


class Rendered(Passing):
    producer = SqliteProducer(queue="q", path="/nowhere/q.db")
    batchers = {"small": Batcher()}

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> None:
        return None


def test_templated_shutdown_is_checked_when_rendered():
    ref = make_ref(Templated(shutdown="{{ var.value.x }}"))
    assert ref["options"] == {"shutdown": "{{ var.value.x }}"}
    assert load_ref({**ref, "options": {"shutdown": "5"}}).shutdown == 5.0
    with pytest.raises(OptionsError, match="'shutdown': expected a number of seconds"):
        load_ref({**ref, "options": {"shutdown": "soon"}})


class Templated(Passing):
    producer = SqliteProducer(queue="q", path="/nowhere/q.db")
    batchers = {"late": Batcher(engine="python")}


class Mute(Broadway):
    producer = SqliteProducer(queue="q", path="/nowhere/q.db")


class Unbatched(Mute):
    batchers = {"late": Batcher(engine="python")}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message


@pytest.mark.parametrize(
    ("pipeline", "missing"),
    [
        (Mute, "Mute.handle_message"),
        (Unbatched, "Unbatched.handle_batch"),
        (f"{__name__}:Unbatched", "Unbatched.handle_batch"),
    ],
)
def test_pipeline_without_required_callback_is_refused(pipeline, missing):
    with pytest.raises(OptionsError, match=missing):
        BroadwayProcessorOperator(task_id="pull", pipeline=pipeline)


class WithInit(Templated):
    def __init__(self, **overrides: Any) -> None:
        super().__init__(**overrides)
        self.rates = {"EUR": 1.0}


def test_constructor_override_is_refused_in_favor_of_setup():
    with pytest.raises(OptionsError, match=r"WithInit\.__init__.*setup\(self, run\)"):
        WithInit()
    # The same for a pipeline named by its path, which a worker builds
    with pytest.raises(OptionsError, match="setup"):
        load_ref({"class": f"{__name__}:WithInit", "options": {}})


class Forgetful(Passing):
    """A constructor that does not call ours."""

    producer = Orders.producer

    def __init__(self) -> None:
        self.target = "/data"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Forgetful.dag("orders"),
        lambda: Forgetful.task_group("orders"),
        lambda: make_ref(Forgetful),
        Forgetful,
    ],
)
def test_constructor_without_super_is_refused(make):
    with pytest.raises(OptionsError, match=r"Forgetful\.__init__.*setup\(self, run\)"):
        make()


class MessageOnly(Orders):
    def handle_message(self, message: Message) -> Message:  # type: ignore[override]
        return message


class WithoutInfo(Orders):
    def handle_batch(self, batcher: str, messages: Any, context: Any) -> Any:  # type: ignore[override]
        return messages


class SetupWithoutRun(Orders):
    def setup(self) -> Any:  # type: ignore[override]
        return {}


class Wanting(Orders):
    def handle_failed(self, messages: Any, context: Any, reason: str) -> Any:  # type: ignore[override]
        return messages


@pytest.mark.parametrize(
    ("pipeline", "text"),
    [
        (
            MessageOnly,
            r"\(self, processor, message, context\), got: 'handle_message\(self, message\)'",
        ),
        (WithoutInfo, r"handle_batch\(self, batcher, messages, batch_info, context\)"),
        (SetupWithoutRun, r"setup\(self, run\), got: 'setup\(self\)'"),
        (Wanting, r"handle_failed\(self, messages, context\)"),
    ],
)
def test_callback_with_wrong_arguments_is_refused_at_parse(pipeline, text):
    with pytest.raises(OptionsError, match=text):
        pipeline.dag("orders")


class Free(Orders):
    """Signatures that can be called all the same."""

    @staticmethod
    def handle_message(*args: Any) -> Any:
        return args[1]

    def handle_batch(self, batcher: str, messages: Any, *rest: Any, **more: Any) -> Any:
        return messages

    @classmethod
    def handle_failed(cls, messages: Any, context: Any = None, extra: int = 0) -> Any:
        return messages


def test_compatible_callback_signatures_are_accepted():
    assert Free.dag("orders").dag_id == "orders"


@pytest.mark.parametrize(
    ("declare", "name", "near"),
    [
        (Orders.dag, "sprak", "spark"),
        (Orders.dag, "schedul", "schedule"),
        (Orders.task_group, "sprak", "spark"),
        (Orders.task_group, "tooltp", "tooltip"),
        (Orders.task_group, "schedule", None),
    ],
)
def test_mistyped_argument_names_the_nearest(declare, name, near):
    with pytest.raises(OptionsError) as caught:
        declare("orders", **{name: {"conn_id": "x"}})
    assert f".{name}'" in str(caught.value)
    assert str(caught.value).endswith(f"did you mean {near!r}?") is (near is not None)
