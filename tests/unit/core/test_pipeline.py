"""Overrides of options: replaced, unchanged and refused values."""

from __future__ import annotations

import pytest

from airflow_broadway import Batcher, Broadway, Processors, RateLimiting, RetryPolicy
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.reference import make_ref
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.sinks import IcebergTable
from airflow_broadway.testing import DummyProducer, test_message
from tests.unit.passing import Passing


class Orders(Passing):
    producer = SqliteProducer(
        queue="orders",
        path="/nowhere/q.db",
        lease=40.0,
        retry=RetryPolicy(max_attempts=3, backoff=5.0),
        rate_limiting=RateLimiting(allowed_messages=10, interval=60.0),
    )
    processors = Processors(concurrency=3, max_demand=8)
    batchers = {
        "small": Batcher(engine="python", batch_size=7, batch_timeout=2.0),
        "large": Batcher(schema="n int"),
    }
    context = {"shop": "fruit", "rates": {"EUR": 1.0}}


def test_nested_override_keeps_other_options():
    orders = Orders(
        producer={
            "queue": "eu",
            "retry": {"max_attempts": 9},
            "rate_limiting": {"allowed_messages": 20},
        },
        processors={"concurrency": 5},
        batchers={"small": {"batch_size": 70}},
    )

    declared = Orders.producer
    assert (orders.producer.queue, orders.producer.lease) == ("eu", declared.lease)
    assert orders.producer.retry == RetryPolicy(max_attempts=9, backoff=5.0)
    assert orders.producer.rate_limiting == RateLimiting(allowed_messages=20, interval=60.0)
    assert (orders.processors.concurrency, orders.processors.max_demand) == (5, 8)
    small = orders.batchers["small"]
    assert (small.batch_size, small.batch_timeout, small.engine) == (70, 2.0, "python")
    assert orders.batchers["large"] == Orders().batchers["large"]
    # and the class is as it was
    assert Orders().producer.retry.max_attempts == 3


def test_context_is_replaced_whole():
    assert Orders(context={"shop": "books"}).context == {"shop": "books"}


def test_functions_cannot_be_overridden():
    for override in (
        {"partition_by": lambda message: 0},
        {"processors": {"partition_by": lambda message: 0}},
        {"batchers": {"small": {"partition_by": lambda message: 0}}},
        {"producer": {"transformer": lambda message: message}},
    ):
        with pytest.raises(OptionsError):
            make_ref(Orders(**override))


@pytest.mark.parametrize(
    ("name", "holds"),
    [("n" * 100, True), ("n" * 101, False), ("a.b-c_1", True), ("a b", False), ("a/b", False)],
)
def test_name_has_at_most_a_hundred_portable_characters(name, holds):
    if holds:
        assert Orders(name=name).name == name
        return
    with pytest.raises(OptionsError, match="'name'"):
        Orders(name=name)


def test_sink_without_open_spark_is_refused_for_spark_batchers():
    sink = IcebergTable(table="lake.orders")
    assert Batcher(engine="python", sink=sink).sink == sink
    with pytest.raises(OptionsError, match=r"sink for Spark batchers .*use engine='python'"):
        Batcher(sink=sink)


def test_wrong_callbacks_are_refused_before_a_message_is_received(tmp_path):
    path = str(tmp_path / "queue.db")

    class Wrong(Passing):
        producer = SqliteProducer(queue="q", path=path)

        def handle_message(self, message):  # type: ignore[override]
            return message

    queue = SqliteQueue(path, "q")
    queue.create()
    queue.send([b"1"])
    with pytest.raises(OptionsError, match=r"handle_message\(self, processor, message, context\)"):
        Wrong().run_local()
    assert queue.depth().ready == 1


def test_setup_precedes_other_callbacks():
    calls: list[str] = []

    class Watched(Broadway):
        producer = DummyProducer()
        batchers = {"default": Batcher(engine="python")}

        def setup(self, run):
            calls.append(f"setup {run.dag_id} {self.run.run_id}")

        def prepare_messages(self, messages, context):
            calls.append("prepare_messages")
            return messages

        def handle_message(self, processor, message, context):
            calls.append("handle_message")
            return message

        def handle_batch(self, batcher, messages, info, context):
            calls.append("handle_batch")
            return messages

    test_message(Watched, 1)

    assert calls == ["setup local local", "prepare_messages", "handle_message", "handle_batch"]
