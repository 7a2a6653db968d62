"""When it is told that a backlog has reached its bounds, and which run serves that."""

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
        """What another triggerer has."""
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
        """What so many looks tell, one after the other."""
        told = []
        for _ in range(number):
            found, self.wait = self.watch.step()
            self.clock.advance(self.wait)
            told += [found] if found is not None else []
        return told


@pytest.fixture
def world() -> World:
    return World(backlog(min_messages=10, max_age=60.0, poke_interval=INTERVAL))


# -- one event a crossing ------------------------------------------------------------------------


def test_a_crossing_is_told_once_with_how_much_and_how_old(world: World) -> None:
    world.ready = 9
    assert world.looks(3) == []

    world.ready, world.age = 10, 5.0
    [told] = world.looks(3)

    assert told["reason"] == "10 messages (min_messages=10)"
    assert (told["ready"], told["oldest_age"], told["told"]) == (10, 5.0, 1)
    assert told["at"] == told["crossing"] == "2026-01-01T00:00:30+00:00"


def test_one_old_message_is_a_crossing(world: World) -> None:
    world.ready, world.age = 1, 59.0
    assert world.looks() == []
    world.age = 60.0
    assert [told["reason"] for told in world.looks()] == ["the oldest since 60 s (max_age=60)"]


def test_only_what_a_run_could_receive_now_counts() -> None:
    others = QueueDepth(ready=2, delayed=50, leased=50, dead=50, oldest_age=9.0)
    assert reasons(backlog(min_messages=3), others) == []
    none = others._replace(ready=0)
    assert reasons(backlog(min_messages=1, max_age=1.0), none) == []


def test_it_is_armed_again_when_the_backlog_fell(world: World) -> None:
    world.ready = 10
    assert len(world.looks(2)) == 1
    world.ready = 3
    assert world.looks() == []
    world.ready = 10
    assert len(world.looks(2)) == 1


def test_it_is_armed_again_when_a_run_was_made_and_waits_while_that_is_at_work(
    world: World,
) -> None:
    world.ready = 10
    assert len(world.looks()) == 1
    # A run is at work, and has not taken anything yet
    world.runs = Runs(open=1, ever=1)
    assert world.looks(5) == []
    # It has ended, and left as much as is a reason
    world.runs = Runs(open=0, ever=1)
    assert len(world.looks(3)) == 1


def test_a_dag_that_may_have_several_runs_gets_another_while_the_backlog_stays(
    world: World,
) -> None:
    world.max_runs = 2
    world.watch = world.another()
    world.ready = 10
    assert len(world.looks()) == 1
    world.runs = Runs(open=1, ever=1)
    assert len(world.looks()) == 1
    world.runs = Runs(open=2, ever=2)
    assert world.looks(5) == []


def test_where_looks_are_behind_a_run_that_has_ended_leads_to_no_empty_ones(world: World) -> None:
    # Given a broker whose numbers are a minute old
    world.watch = world.another()
    world.watch.lag = 60.0
    world.ready = 10
    assert len(world.looks()) == 1
    world.runs = Runs(open=1, ever=1)
    assert world.looks(10) == []

    # When the run has ended, and what it took is counted still
    world.runs = Runs(open=0, ever=1)
    assert world.looks(6) == []

    # Then what is counted after that minute is there
    assert len(world.looks(2)) == 1


# -- nothing is lost -----------------------------------------------------------------------------


def test_what_led_to_no_run_is_told_again_later_each_time(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.ready = 10
    first, *again = world.looks(round(7 * REPEAT / INTERVAL))

    # after 60 seconds, and 120 more
    assert [told["told"] for told in again] == [2, 3]
    assert {told["crossing"] for told in again} == {first["crossing"]}
    assert "reported 2 times by now.  Is the Dag paused" in caplog.text


def test_at_its_cap_it_waits_and_tells_when_a_run_has_ended(world: World) -> None:
    world.ready, world.runs = 10, Runs(open=1, ever=1)
    assert world.looks(20) == []
    world.runs = Runs(open=0, ever=1)
    assert len(world.looks(2)) == 1


def test_at_its_cap_for_long_it_tells_and_airflow_keeps_the_event(world: World) -> None:
    # A backfill, say, which nothing tells from other runs
    world.ready, world.runs = 10, Runs(open=1, ever=1)
    told = world.looks(round(MAX_HOLD / INTERVAL) + 1)
    assert len(told) == 1
    assert len(world.looks(round(MAX_HOLD / INTERVAL) - 1)) == 0


def test_a_run_that_is_deleted_arms_nothing_and_hides_no_new_one(world: World) -> None:
    world.ready, world.runs = 10, Runs(open=0, ever=5)
    assert len(world.looks()) == 1
    world.runs = Runs(open=0, ever=2)
    assert world.looks() == []
    world.runs = Runs(open=0, ever=3)  # less than at first, and yet one was made
    assert len(world.looks()) == 1


# -- what goes wrong -----------------------------------------------------------------------------


def test_a_broker_that_is_away_is_looked_at_later_each_time_and_tells_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_database_that_is_away_when_the_runs_are_asked_for_loses_no_crossing(
    world: World,
) -> None:
    answers: list[Runs | Exception] = [OSError("away"), Runs(0, 0)]

    def runs() -> Runs:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    world.watch.runs = runs
    world.ready = 10
    assert world.looks() == []
    assert len(world.looks()) == 1


def test_an_age_that_is_not_known_is_said_once_and_is_no_reason(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.ready, world.age = 9, None
    assert world.looks(3) == []
    assert caplog.text.count("The age of the oldest message is not known") == 1

    world.ready = 10
    [told] = world.looks()
    assert told["oldest_age"] is None
    assert reasons(backlog(max_age=0.001), depth(5)) == []


def test_of_an_empty_queue_no_age_is_missed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.age = None
    assert world.looks(2) == []
    assert caplog.text == ""


def test_a_broker_that_does_not_say_is_said_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
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
    """A producer of somebody's own, which takes whatever it is given."""

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


@pytest.mark.parametrize("producer", PRODUCERS, ids=lambda each: each.kind)
def test_what_is_stored_has_all_that_a_look_goes_by(producer: Producer) -> None:
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


def test_each_shard_is_watched_and_no_function_is_stored() -> None:
    producer = RabbitMQProducer(
        queue="orders", conn_id="q", on_failure="retry", concurrency=3, merge_options=shard
    )
    text = WatchedQueues("orders", producer.shards()).dumps()
    found = [getattr(each, "queue") for each in WatchedQueues.loads(text).producers]  # noqa: B009
    assert found == ["orders-0", "orders-1", "orders-2"]


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
def test_a_secret_or_a_template_is_refused(producer: Producer, error: str) -> None:
    with pytest.raises(OptionsError, match=error) as raised:
        WatchedQueues("orders", producer.shards()).dumps()
    assert "hidden" not in str(raised.value)


def test_a_producer_that_the_triggerer_cannot_import_is_refused() -> None:
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
    """A producer that tells what it is told to."""

    def depth(self, env: ProducerEnv) -> QueueDepth | None:
        found = {1: depth(5, 3.0), 2: depth(0), 3: depth(2), 4: depth(7, 9.0)}
        return found.get(self.concurrency)


@pytest.mark.parametrize(
    ("shards", "together"),
    [
        ([1, 4], depth(12, 9.0)),
        ([1, 2], depth(5, 3.0)),  # an empty queue has no oldest
        ([1, 3], depth(7)),  # of one the age is not known: it may be the oldest
        ([1, 5], None),  # one does not say
    ],
)
def test_the_queues_of_a_pipeline_count_together(
    shards: list[int], together: QueueDepth | None
) -> None:
    queues = WatchedQueues("orders", [Fixed(concurrency=number) for number in shards])
    assert queues.depth(ProducerEnv()) == together


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, r"required option 'Backlog\.min_messages' not found"),
        ({"min_messages": 0}, r"Backlog\.min_messages': expected a positive integer"),
        ({"max_age": -1}, r"Backlog\.max_age': expected a number of seconds"),
        ({"max_age": timedelta(minutes=1)}, r"Backlog\.max_age': expected a number of seconds"),
        ({"max_age": 1, "poke_interval": 0}, r"Backlog\.poke_interval': expected a number of"),
        ({"min_messages": "{{ n }}"}, r"Backlog\.min_messages': expected no template"),
    ],
)
def test_each_bound_is_checked_with_one_error(given: dict[str, Any], error: str) -> None:
    with pytest.raises(OptionsError, match=error):
        backlog(**given)


# -- which run serves ----------------------------------------------------------------------------


def staged(folder: Path, run_id: str) -> StagedRun:
    store = Store.open(f"file://{folder}")
    return StagedRun(store, pipeline="orders", dag_id="d", run_id=run_id)


def test_two_triggerers_tell_one_crossing_and_the_second_run_says_which_served_it(
    tmp_path: Path, world: World
) -> None:
    # Given two triggerers that see the same crossing
    world.ready = 10
    [first] = world.looks()
    world.watch = world.another()
    [second] = world.looks()
    assert first["at"] != second["at"]

    # When the event of each has started a run
    assert claim_events(staged(tmp_path, "one"), [first], world.clock) is None
    told = claim_events(staged(tmp_path, "two"), [second], world.clock)

    # Then the second ends, and says why
    assert told is not None
    assert "10 messages (min_messages=10).  The run one began at 2026-01-01T00:00:20" in told


def test_a_later_event_is_served_and_so_are_the_other_tasks_of_a_run(
    tmp_path: Path, world: World
) -> None:
    world.ready = 10
    [first] = world.looks()
    assert claim_events(staged(tmp_path, "one"), [first], world.clock) is None
    assert claim_events(staged(tmp_path, "one"), [first], world.clock) is None  # a mapped sibling

    world.clock.advance(1.0)
    world.runs = Runs(open=0, ever=1)
    [later] = world.looks()
    assert claim_events(staged(tmp_path, "two"), [first, later], world.clock) is None


@pytest.mark.parametrize("text", ["", "[]", '{"run_id": 1}', '{"run_id": "x", "at": "never"}'])
def test_a_mark_that_is_damaged_stops_no_run(tmp_path: Path, world: World, text: str) -> None:
    world.ready = 10
    told = world.looks()
    run = staged(tmp_path, "one")
    mark = tmp_path / "orders" / "d" / "_events" / "served.json"
    mark.parent.mkdir(parents=True)
    mark.write_text(text)
    assert claim_events(run, told, world.clock) is None
    assert json.loads(mark.read_text())["run_id"] == "one"
