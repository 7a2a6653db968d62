"""Events of a backlog that reaches its bounds, and the run that serves them."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Broadway, Message, RetryPolicy, backlog
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import OptionsError, PipelineError, ProducerError
from airflow_broadway.core.model.backlog import Backlog
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import Rule
from airflow_broadway.producers import (
    KafkaProducer,
    PubSubProducer,
    RabbitMQProducer,
    SqliteProducer,
    SqsProducer,
)
from airflow_broadway.runs.backlog.crossings import MAX_HOLD, REPEAT, BacklogWatch, Runs, reasons
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.runs.backlog.served import claim_events
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from airflow_broadway.testing.clock import ManualClock

INTERVAL = 10.0


def depth(ready: int, age: float | None = None) -> QueueDepth:
    return QueueDepth(ready=ready, delayed=0, leased=0, dead=0, oldest_age=age)


@dataclass
class World:
    """A queue and a Dag, as a test says they are; time moves by the looks."""

    bounds: Backlog
    max_runs: int = 1
    ready: int = 0
    age: float | None = 1.0
    runs: Runs = field(default_factory=lambda: Runs(0, 0))
    error: Exception | None = None
    clock: ManualClock = field(default_factory=ManualClock)
    wait: float = 0.0

    def __post_init__(self) -> None:
        self.watch = self.another()

    def another(self) -> BacklogWatch:
        """The watch of another triggerer."""
        return BacklogWatch(
            bounds=self.bounds,
            look=self._depth,
            runs=lambda: self.runs,
            max_runs=self.max_runs,
            clock=self.clock,
        )

    def _depth(self) -> QueueDepth:
        if self.error is not None:
            raise self.error
        return depth(self.ready, self.age)

    def looks(self, number: int = 1) -> list[dict[str, Any]]:
        """The events of this number of looks."""
        events = []
        for _ in range(number):
            event, self.wait = self.watch.step()
            self.clock.advance(self.wait)
            events += [event] if event is not None else []
        return events


@pytest.fixture
def world():
    return World(backlog(min_messages=10, max_age=60.0, poke_interval=INTERVAL))


# -- one event a crossing ------------------------------------------------------------------------


def test_crossing_is_reported_once_with_depth_and_age(world):
    world.ready = 9
    assert world.looks(3) == []

    world.ready, world.age = 10, 5.0
    [events] = world.looks(3)

    assert events["reason"] == "10 messages (min_messages=10)"
    assert (events["ready"], events["oldest_age"], events["reports"]) == (10, 5.0, 1)
    assert events["at"] == events["crossing"] == "2026-01-01T00:00:30+00:00"


def test_one_old_message_is_a_crossing(world):
    world.ready, world.age = 1, 59.0
    assert world.looks() == []
    world.age = 60.0
    assert [event["reason"] for event in world.looks()] == ["the oldest since 60 s (max_age=60)"]


def test_only_ready_messages_count():
    others = QueueDepth(ready=2, delayed=50, leased=50, dead=50, oldest_age=9.0)
    assert reasons(backlog(min_messages=3), others) == []
    none = others._replace(ready=0)
    assert reasons(backlog(min_messages=1, max_age=1.0), none) == []


def test_watch_rearms_when_the_backlog_falls(world):
    world.ready = 10
    assert len(world.looks(2)) == 1
    world.ready = 3
    assert world.looks() == []
    world.ready = 10
    assert len(world.looks(2)) == 1


def test_watch_rearms_after_a_run_and_waits_while_it_is_active(world):
    world.ready = 10
    assert len(world.looks()) == 1
    # A run is at work, and has not taken anything yet
    world.runs = Runs(open=1, ever=1)
    assert world.looks(5) == []
    # It has ended, and left as much as is a reason
    world.runs = Runs(open=0, ever=1)
    assert len(world.looks(3)) == 1


def test_further_runs_start_up_to_max_runs_while_backlog_stays(world):
    world.max_runs = 2
    world.watch = world.another()
    world.ready = 10
    assert len(world.looks()) == 1
    world.runs = Runs(open=1, ever=1)
    assert len(world.looks()) == 1
    world.runs = Runs(open=2, ever=2)
    assert world.looks(5) == []


def test_stale_depth_after_a_run_starts_no_empty_run(world):
    # Given a broker whose numbers are a minute old
    world.watch = world.another()
    world.watch.lag = 60.0
    world.ready = 10
    assert len(world.looks()) == 1
    world.runs = Runs(open=1, ever=1)
    assert world.looks(10) == []

    # When the run has ended, and its messages are still counted
    world.runs = Runs(open=0, ever=1)
    assert world.looks(6) == []

    # Then messages that are counted after that minute remain
    assert len(world.looks(2)) == 1


# -- nothing is lost -----------------------------------------------------------------------------


def test_unserved_crossing_is_repeated_with_backoff(world, caplog):
    world.ready = 10
    first, *again = world.looks(round(7 * REPEAT / INTERVAL))

    # after 60 seconds, and 120 more
    assert [event["reports"] for event in again] == [2, 3]
    assert {event["crossing"] for event in again} == {first["crossing"]}
    assert "reported 2 times by now.  Is the Dag paused" in caplog.text


def test_event_follows_the_end_of_the_run_at_max_runs(world):
    world.ready, world.runs = 10, Runs(open=1, ever=1)
    assert world.looks(20) == []
    world.runs = Runs(open=0, ever=1)
    assert len(world.looks(2)) == 1


def test_event_is_sent_after_max_hold_at_max_runs(world):
    # A backfill, say, which nothing tells from other runs
    world.ready, world.runs = 10, Runs(open=1, ever=1)
    events = world.looks(round(MAX_HOLD / INTERVAL) + 1)
    assert len(events) == 1
    assert len(world.looks(round(MAX_HOLD / INTERVAL) - 1)) == 0


def test_deleted_run_neither_rearms_nor_hides_a_new_one(world):
    world.ready, world.runs = 10, Runs(open=0, ever=5)
    assert len(world.looks()) == 1
    world.runs = Runs(open=0, ever=2)
    assert world.looks() == []
    world.runs = Runs(open=0, ever=3)  # fewer than at first, although one was created
    assert len(world.looks()) == 1


# -- errors --------------------------------------------------------------------------------------


def test_unavailable_broker_is_polled_with_backoff(world, caplog):
    world.ready, world.error = 10, ProducerError("amqp://guest:secret@broker is away")
    waits = []
    for _ in range(8):
        assert world.looks() == []
        waits.append(world.wait)
    assert waits == [20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0, 300.0]
    assert "8 failures in a row" in caplog.text
    assert "secret" not in caplog.text

    world.error = None
    assert len(world.looks()) == 1
    assert world.wait == INTERVAL


def test_unavailable_database_loses_no_crossing(world):
    answers: list[Runs | Exception] = [OSError("away"), Runs(0, 0)]

    def runs():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    world.watch.runs = runs
    world.ready = 10
    assert world.looks() == []
    assert len(world.looks()) == 1


def test_unknown_age_is_logged_once_and_is_no_reason(world, caplog):
    world.ready, world.age = 9, None
    assert world.looks(3) == []
    assert caplog.text.count("The age of the oldest message is not known") == 1

    world.ready = 10
    [events] = world.looks()
    assert events["oldest_age"] is None
    assert reasons(backlog(max_age=0.001), depth(5)) == []


def test_empty_queue_needs_no_age(world, caplog):
    world.age = None
    assert world.looks(2) == []
    assert caplog.text == ""


def test_unknown_depth_is_logged_once(world, caplog):
    caplog.set_level(logging.INFO)
    world.watch.look = lambda: None
    assert world.looks(3) == []
    assert caplog.text.count("does not say how full") == 1


# -- which queues --------------------------------------------------------------------------------


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", conn_id="orders", transformer=lambda message: message)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message


def shard(index: int) -> dict[str, Any]:
    return {"queue": f"orders-{index}"}


@options
class Addressed(Producer):
    """A user's producer with any options."""

    address: Any = option(default=None, rule=Rule("anything", lambda _: True), doc="Where.")


PRODUCERS: list[Producer] = [
    SqliteProducer(queue="orders", conn_id="q", busy_timeout=2.0, on_failure="dead_letter"),
    RabbitMQProducer(
        queue="orders",
        conn_id="q",
        on_failure="retry",
        declare={"durable": True},
        after_connect=lambda channel: None,
    ),
    SqsProducer(queue_name="orders.fifo", conn_id="q", retry=RetryPolicy(max_attempts=2)),
    KafkaProducer(group_id="orders", topics=["orders"], settings={"fetch.min.bytes": 5}),
    PubSubProducer(subscription="orders", on_failure=("nack", 10)),
]


@pytest.mark.parametrize("producer", PRODUCERS, ids=lambda producer: producer.kind)
def test_stored_queues_keep_the_options_of_a_look(producer):
    text = WatchedQueues("orders", producer.shards()).dumps()
    [loaded] = WatchedQueues.loads(text).producers

    for name in (
        "queue",
        "queue_name",
        "conn_id",
        "topics",
        "group_id",
        "settings",
        "subscription",
        "busy_timeout",
        "declare",
    ):
        assert getattr(loaded, name, None) == getattr(producer, name, None), name
    assert type(loaded) is type(producer)


def test_each_shard_is_watched_and_no_function_is_stored():
    producer = RabbitMQProducer(
        queue="orders", conn_id="q", on_failure="retry", concurrency=3, merge_options=shard
    )
    text = WatchedQueues("orders", producer.shards()).dumps()
    queues = [getattr(producer, "queue") for producer in WatchedQueues.loads(text).producers]  # noqa: B009
    assert queues == ["orders-0", "orders-1", "orders-2"]


@pytest.mark.parametrize(
    ("producer", "error"),
    [
        (
            Addressed(address="amqp://user:hidden@broker"),
            r"producer\.address': expected no secret, .* give it by conn_id",
        ),
        (Addressed(address={"sasl.password": "hidden"}), r"producer\.address': expected no secret"),
        (Addressed(address=object()), r"producer\.address': expected a JSON value"),
        (
            SqliteProducer(queue="q-{{ ds }}", conn_id="c"),
            r"producer\.queue': expected no template",
        ),
    ],
    ids=["address", "setting", "object", "template"],
)
def test_secret_or_template_is_refused(producer, error):
    with pytest.raises(OptionsError, match=error) as raised:
        WatchedQueues("orders", producer.shards()).dumps()
    assert "hidden" not in str(raised.value)


def test_producer_that_is_not_importable_is_refused():
    @options
    class Local(Producer):
        """A producer of a function."""

    with pytest.raises(OptionsError, match="a class of an importable module"):
        WatchedQueues("orders", [Local()]).dumps()
    queues = [{"producer": "no_such_module:Producer", "options": {}}]
    with pytest.raises(PipelineError, match="install its module where the triggerer runs"):
        WatchedQueues.loads(json.dumps({"pipeline": "orders", "lag": 0.0, "queues": queues}))


@options
class Fixed(Producer):
    """A producer with a fixed depth."""

    def depth(self, env: ProducerEnv) -> QueueDepth | None:
        depths = {1: depth(5, 3.0), 2: depth(0), 3: depth(2), 4: depth(7, 9.0)}
        return depths.get(self.concurrency)


@pytest.mark.parametrize(
    ("shards", "together"),
    [
        ([1, 4], depth(12, 9.0)),
        ([1, 2], depth(5, 3.0)),  # an empty queue has no oldest
        ([1, 3], depth(7)),  # of one the age is not known: it may be the oldest
        ([1, 5], None),  # one does not say
    ],
)
def test_depths_of_a_pipelines_queues_are_added(shards, together):
    queues = WatchedQueues("orders", [Fixed(concurrency=number) for number in shards])
    assert queues.depth(ProducerEnv()) == together


@pytest.mark.parametrize(
    ("bounds", "error"),
    [
        ({}, r"required option 'Backlog\.min_messages' not found"),
        ({"min_messages": 0}, r"Backlog\.min_messages': expected a positive integer"),
        ({"max_age": -1}, r"Backlog\.max_age': expected a number of seconds"),
        ({"max_age": timedelta(minutes=1)}, r"Backlog\.max_age': expected a number of seconds"),
        ({"max_age": 1, "poke_interval": 0}, r"Backlog\.poke_interval': expected a number of"),
        ({"min_messages": "{{ n }}"}, r"Backlog\.min_messages': expected no template"),
    ],
)
def test_each_bound_is_checked_with_one_error(bounds, error):
    with pytest.raises(OptionsError, match=error):
        backlog(**bounds)


# -- which run serves ----------------------------------------------------------------------------


def staged(folder: Path, run_id: str) -> StagedRun:
    store = Store.open(f"file://{folder}")
    return StagedRun(store, pipeline="orders", dag_id="d", run_id=run_id)


def test_second_run_of_one_crossing_is_skipped_with_reason(tmp_path, world):
    # Given two triggerers that see the same crossing
    world.ready = 10
    [first] = world.looks()
    world.watch = world.another()
    [second] = world.looks()
    assert first["at"] != second["at"]

    # When both events have started a run
    assert claim_events(staged(tmp_path, "one"), [first], world.clock) is None
    reason = claim_events(staged(tmp_path, "two"), [second], world.clock)

    # Then the second ends, and says why
    assert reason is not None
    assert "10 messages (min_messages=10).  The run one began at 2026-01-01T00:00:20" in reason


def test_later_event_and_mapped_siblings_are_served(tmp_path, world):
    world.ready = 10
    [first] = world.looks()
    assert claim_events(staged(tmp_path, "one"), [first], world.clock) is None
    assert claim_events(staged(tmp_path, "one"), [first], world.clock) is None  # a mapped sibling

    world.clock.advance(1.0)
    world.runs = Runs(open=0, ever=1)
    [later] = world.looks()
    assert claim_events(staged(tmp_path, "two"), [first, later], world.clock) is None


@pytest.mark.parametrize("text", ["", "[]", '{"run_id": 1}', '{"run_id": "x", "at": "never"}'])
def test_damaged_mark_stops_no_run(tmp_path, world, text):
    world.ready = 10
    events = world.looks()
    run = staged(tmp_path, "one")
    mark = tmp_path / "orders" / "d" / "_events" / "served.json"
    mark.parent.mkdir(parents=True)
    mark.write_text(text)
    assert claim_events(run, events, world.clock) is None
    assert json.loads(mark.read_text())["run_id"] == "one"
