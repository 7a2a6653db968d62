"""Holding queues at a real broker: opened, fenced off, settled, swept and reused."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pika
import pytest

from airflow_broadway.core.custody.protocol import Lease, Settlement, Source
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker.holding_queues import (
    EXCHANGE,
    KEEPING,
    HoldingQueue,
    HoldingQueues,
)
from airflow_broadway.producers.rabbitmq.bundle import VERSION, Header, Held, pack, unpack
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.testing.contract import ids, settlement_of
from tests.rabbitmq_fixtures import skip_without_own_server
from tests.rabbitmq_place import Breaker, Place, marked
from tests.waiting import eventually

pytestmark = pytest.mark.broker

#: The content type in frames that publish a bundle.
BUNDLE = b"application/x-broadway-bundle"


def empty_bundle(queue: str, generation: str) -> bytes:
    header = Header(
        bundle=f"{generation}.0", generation=generation, queue=queue, count=0, until=2e9
    )
    return pack(header, [])


@contextmanager
def connect(place: Place) -> Iterator[ConnectionThread]:
    connection = ConnectionThread.to(address_for(place.producer(), place.env()))
    try:
        yield connection
    finally:
        connection.close()


def hold_by_dead_run(place: Place, generation: str, count: int, **options: Any) -> list[Message]:
    """Receives messages as a run that dies before its manifest, and whose lease then lapses."""
    place.send(*[b"%06d" % number for number in range(count)])
    messages, _ = place.hold(generation, lease=3.0, on_failure="retry", **options)
    assert len(messages) == count
    return messages


def await_lapse(place: Place) -> None:
    """Waits until the bundles of a dead run count as ready: all but the one that opens its queue.

    A slow broker's messages come in more bundles.
    """
    bundles = place.depth(place.queues.held(0))
    assert bundles
    eventually(lambda: place.producer().depth(place.env("look")).ready == bundles - 1)


def count_atoms(place: Place) -> int:
    """Counts the node's Erlang atoms.  Each call of ``rabbitmqctl eval`` creates some itself."""
    text = place.server.evaluate("erlang:system_info(atom_count).")
    return int(text)


# -- reuse -----------------------------------------------------------------------------------------


def test_consecutive_runs_reuse_a_holding_queue(place):
    for turn in range(4):
        place.send(b"%d" % turn)
        messages, lease = place.hold(f"g{turn}")
        assert lease.state["holding_queue"] == place.queues.held(0)
        assert place.carry_out(lease, settlement_of(messages)) == SettleReport(acked=1)
        assert place.depth(place.queues.held(0)) == 0

    assert place.depth(place.queues.held(1)) is None


def test_concurrent_generations_have_separate_holding_queues(place):
    result = []
    for turn in range(3):
        place.send(b"%d" % turn)
        result.append(place.hold(f"g{turn}"))

    used = [lease.state["holding_queue"] for _, lease in result]
    assert used == [place.queues.held(number) for number in range(3)]
    for messages, lease in result:
        assert place.carry_out(lease, settlement_of(messages)) == SettleReport(acked=1)
    assert place.count(*used) == 0


def test_a_deleted_empty_holding_queue_is_redeclared(place):
    place.send(b"1")
    assert place.settle("g1")[1] == SettleReport(acked=1)
    with place.channel() as channel:
        channel.queue_delete(place.queues.held(0))
    place.send(b"2")

    assert place.settle("g2")[1] == SettleReport(acked=1)


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("runs", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_runs_create_no_erlang_atoms(place, runs):
    skip_without_own_server()
    holding, body = HoldingQueues(place.queues), b""
    declare = place.standing_queues().ensure_held
    with connect(place) as connection:

        def run(generation: str) -> None:
            """Opens, settles and frees a holding queue, as a run does."""
            nonlocal body
            body = empty_bundle(place.name, generation)
            name = holding.open(
                connection, declare, generation, body, earlier="", note=lambda name: None
            )
            with holding.claim(connection, name) as queue:
                assert queue is not None
                assert queue.owner() is not None
                queue.fence(generation)
                assert queue.purge() == 0
                queue.free()

        for number in range(20):
            run(f"warm-{number}")
        count_atoms(place)
        before = count_atoms(place)
        for number in range(runs):
            run(f"run-{number}")
        assert abs(count_atoms(place) - before) <= 20


# -- a dead run ------------------------------------------------------------------------------------


def test_a_dead_runs_messages_are_taken_over_from_its_holding_queue(place):
    messages = hold_by_dead_run(place, "dead", 1_200)
    [(name, bundles)] = [
        (name, place.depth(name))
        for name in place.server.queue_names("broadway.held.")
        if place.name in name and not name.endswith(".claim") and place.depth(name)
    ]
    assert name == place.queues.held(0)
    assert bundles >= 4  # the opening, and at most 500 messages in each of the others
    await_lapse(place)

    taken, report = place.settle("next")

    assert sorted(ids(taken)) == sorted(ids(messages))
    assert all(message.redelivered and message.attempt == 1 for message in taken)
    assert report == SettleReport(acked=1_200)
    assert place.depth(name) == 0


def test_a_run_with_a_valid_lease_is_not_swept(place):
    place.send(b"1")
    messages, lease = place.hold("g1")

    assert place.settle("g2")[0] == []
    assert place.producer().depth(place.env("look")).ready == 0

    assert place.carry_out(lease, settlement_of(messages)) == SettleReport(acked=1)


def test_a_dead_run_of_a_renamed_pipeline_is_taken_over(place):
    messages = hold_by_dead_run(place, "dead", 3)
    await_lapse(place)
    place.folder = place.folder / "renamed"

    assert sorted(ids(place.settle("next")[0])) == sorted(ids(messages))


def test_a_killed_sweep_is_completed_by_the_next(place, monkeypatch):
    messages = hold_by_dead_run(place, "dead", 1_200)
    await_lapse(place)

    def killed(queue: HoldingQueue) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as patch:
        patch.setattr(HoldingQueue, "free", killed)
        with pytest.raises(SystemExit), place.source("killed"):
            pass
    taken, _ = place.settle("next")

    assert {message.data for message in taken} == {message.data for message in messages}
    assert all(message.redelivered for message in taken)


def test_a_run_stopped_before_its_sweep_keeps_every_settlement_record(place):
    # Given a settlement of ten days ago that was killed before the queue was emptied
    place.send(b"1")
    _, lease = place.hold("old")
    env = place.env("next")
    journal = QueueJournal(env.staging, place.name)
    journal.note_opened("old", place.queues.held(0), lease.deadline - timedelta(days=10))
    journal.note_settled("old", SettleReport(acked=1), None)

    # When a run stops as it begins
    place.producer().source(replace(env, stopping=lambda: True)).close()

    # Then a later run handles none of its messages again
    assert journal.log_of("old").settled() is not None
    assert place.settle("later")[0] == []
    assert place.depth(place.queues.held(0)) == 0


def hold_with_full_source(place: Place) -> tuple[Sequence[Message], Lease]:
    """Holds the only message that fits the source queue, and fills the queue with another."""
    with place.channel() as channel:
        channel.queue_delete(place.name)
    place.declare(**{"x-max-length": 1, "x-overflow": "reject-publish"})
    place.send(b"1")
    messages, lease = place.hold("g1")
    place.send(b"in the way")
    return messages, lease


def test_messages_rejected_by_a_full_source_stay_in_the_holding_queue(place, caplog):
    # Given a source queue with room for one message, filled by another
    messages, lease = hold_with_full_source(place)

    # When the first is released
    report = place.carry_out(lease, Settlement(rest=RELEASE))

    # Then it is not settled, and the next run after the queue has room receives it
    assert (report.released, report.failed) == (0, 1)
    assert place.depth(lease.state["holding_queue"]) == 1
    with place.source("in between"):
        pass
    assert "In the holding queue" in caplog.text
    assert place.first(place.name)[1] == b"in the way"
    assert ids(place.settle("next")[0]) == ids(messages)
    assert place.depth(lease.state["holding_queue"]) == 0


def test_released_messages_are_not_purged_while_counts_lag(place, monkeypatch):
    # Given a message to be retried, and a full source queue
    messages, lease = hold_with_full_source(place)
    monkeypatch.setattr(HoldingQueue, "count", lambda *_: lease.state["bundles"])

    # When the count does not include the requeued message yet
    retry = Verdict(Action.RETRY, 0.0, "again", "process")
    report = place.carry_out(lease, settlement_of(messages, {messages[0].message_id: retry}))
    monkeypatch.undo()

    # Then the next run after the queue has room receives it
    assert report.failed == 1
    assert place.first(place.name)[1] == b"in the way"
    assert ids(place.settle("next")[0]) == ids(messages)


@pytest.mark.parametrize("noted", [False, True], ids=["before", "as it opens its queue"])
def test_a_generation_swept_before_its_first_message_cannot_begin(place, noted):
    with place.source("g1") as source:
        lease = source.lease
        if noted:  # and loses its connection
            journal = QueueJournal(place.env().staging, place.name)
            journal.note_opened("g1", place.queues.held(0), lease.deadline)
        assert place.carry_out(lease, Settlement(rest=RELEASE)) == SettleReport()
        place.send(b"1")

        with pytest.raises(LeaseLapsed, match="released before its first message"):
            source.receive(10, timeout=5.0)

        assert list(source.stop()) == []
    assert [message.data for message in place.settle("g2")[0]] == [b"1"]
    assert place.depth(place.queues.held(0)) == 0


def receive_until_lapsed(source: Source) -> LeaseLapsed:
    """Receives until ``LeaseLapsed`` is raised, and returns it."""
    for _ in range(200):
        try:
            source.receive(1_000, timeout=0.5)
        except LeaseLapsed as error:
            return error
    raise AssertionError("the lease did not lapse")


# -- the fence -------------------------------------------------------------------------------------


def test_a_publisher_paused_across_the_unbind_loses_nothing(place):
    # Given a process that is paused as it publishes a bundle, and whose run is released
    with Breaker(place.server.address) as breaker:
        options: dict[str, Any] = {"uri": breaker.uri, "on_failure": "retry"}
        place.send(b"1")
        with place.source("paused", **options) as source:
            assert len(source.receive(1, timeout=5.0)) == 1
            breaker.hold(BUNDLE)
            place.send(b"2", b"3")
            resuming = threading.Thread(target=breaker.release)
            errors: list[LeaseLapsed] = []
            receiving = threading.Thread(target=lambda: errors.append(receive_until_lapsed(source)))
            receiving.start()
            assert breaker.holds.wait(30)
            report = place.carry_out(source.lease, Settlement(rest=RELEASE))
            assert report == SettleReport(released=1)

            # When it resumes
            resuming.start()
            receiving.join(60)
            resuming.join()

            # Then its bundle is returned to it, and it acknowledges nothing
            assert len(errors) == 1
            assert list(source.stop()) == []
    assert place.depth(place.queues.held(0)) == 0
    rest, _ = place.settle("next")
    assert sorted(message.data for message in rest) == [b"1", b"2", b"3"]


def test_a_lapsed_publisher_is_fenced_off_by_the_sweep(place):
    messages = hold_by_dead_run(place, "dead", 3)
    await_lapse(place)

    taken, _ = place.settle("next")

    assert sorted(ids(taken)) == sorted(ids(messages))
    with place.channel() as channel:
        channel.confirm_delivery()
        with pytest.raises(pika.exceptions.UnroutableError):
            channel.basic_publish(EXCHANGE, place.queues.key("dead"), b"late", mandatory=True)


def test_a_publisher_unbound_in_traffic_loses_nothing(place):
    sent = [b"%06d" % number for number in range(5_000)]
    place.send(*sent)
    with place.source("fenced", on_failure="retry") as source:
        assert source.receive(1_000, timeout=5.0)
        releasing = threading.Thread(
            target=lambda: place.carry_out(source.lease, Settlement(rest=RELEASE))
        )
        releasing.start()
        with suppress(LeaseLapsed):  # unless it had received all of them before the unbind
            while source.receive(1_000, timeout=0.5) or releasing.is_alive():
                pass
        releasing.join()

    rest = [*place.settle("next")[0], *place.settle("after")[0]]
    assert sorted({message.data for message in rest}) == sent


def test_a_deleted_exchange_ends_the_run_with_a_remedy(place):
    place.send(b"1")
    with place.source("g1", on_failure="retry") as source:
        assert len(source.receive(1, timeout=5.0)) == 1
        with place.channel() as channel:
            channel.exchange_delete(EXCHANGE)
        place.send(b"2")

        with pytest.raises(LeaseLapsed, match=r"'broadway.held' was deleted.* clear the task"):
            source.receive(1, timeout=5.0)

        source.stop()
        report = place.carry_out(source.lease, Settlement(rest=RELEASE))
    assert report == SettleReport(released=1)
    assert sorted(message.data for message in place.settle("g2")[0]) == [b"1", b"2"]


def publish_late_bundle(place: Place) -> None:
    """Publishes a bundle that was in flight when its generation was fenced off."""
    late = Header(bundle="late.1", generation="g0", queue=place.name, count=1, until=1.0)
    body = pack(late, [Held("m0", 1, False, b"\0\0", b"\0\0", b"late")])
    with place.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish("", place.queues.held(0), body)


@pytest.mark.parametrize("noted", [False, True], ids=["before it settles", "before it purges"])
def test_foreign_bundles_are_left_to_the_next_sweep(place, noted, monkeypatch):
    place.send(b"1")
    messages, lease = place.hold("g1")
    if noted:
        note_settled = QueueJournal.note_settled

        def publish_and_note(*arguments: Any, **options: Any) -> Any:
            publish_late_bundle(place)
            return note_settled(*arguments, **options)

        monkeypatch.setattr(QueueJournal, "note_settled", publish_and_note)
    else:
        publish_late_bundle(place)

    assert place.carry_out(lease, settlement_of(messages)) == SettleReport(acked=1)
    monkeypatch.undo()

    taken, _ = place.settle("g2")
    assert [(m.message_id, m.data, m.redelivered) for m in taken] == [("m0", b"late", True)]
    assert place.depth(place.queues.held(0)) == 0


def test_opening_another_queue_unbinds_the_first(place):
    # Given a generation that lost its connection once bound, and whose queue another now uses
    holding, declare = HoldingQueues(place.queues), place.standing_queues().ensure_held
    first, second = place.queues.held(0), place.queues.held(1)
    with connect(place) as connection, place.channel() as channel:

        def open_queue(generation: str, earlier: str = "") -> str:
            body = empty_bundle(place.name, generation)
            return holding.open(
                connection, declare, generation, body, earlier=earlier, note=lambda name: None
            )

        assert open_queue("other") == first
        channel.queue_bind(first, EXCHANGE, place.queues.key("g1"))

        # When it continues
        assert open_queue("g1", earlier=first) == second
        channel.confirm_delivery()
        channel.basic_publish(EXCHANGE, place.queues.key("g1"), b"bundle", mandatory=True)

    # Then its bundles are only in its new queue
    assert (place.depth(first), place.depth(second)) == (1, 2)


def test_a_claim_ends_with_its_connection(place):
    name, holding = place.queues.held(0), HoldingQueues(place.queues)
    with connect(place) as first, connect(place) as second:
        with holding.claim(first, name) as claimed, holding.claim(second, name) as refused:
            assert claimed is not None
            assert refused is None
        with holding.claim(first, name):
            first.close()
            with holding.claim(second, name, 5.0) as claimed:
                assert claimed is not None


# -- foreign messages ------------------------------------------------------------------------------

NEWER = b"AFBW\x09\x00\x00\x00\x02{}"
GARBAGE = [
    b"",
    b"garbage",
    NEWER,
    b"AFBW" + struct.pack(">BI", VERSION, 4) + b"[[[[",
    b"x" * 100_000,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda body: repr(body[:9]))
def test_a_holding_queue_with_unreadable_messages_is_skipped_and_reported(place, garbage, caplog):
    with place.channel() as channel:
        channel.queue_declare(place.queues.held(0), durable=True, arguments=KEEPING)
        channel.confirm_delivery()
        channel.basic_publish("", place.queues.held(0), garbage)
    place.send(b"1")

    messages, lease = place.hold("g1")

    assert lease.state["holding_queue"] == place.queues.held(1)
    assert f"The holding queue '{place.queues.held(0)}' is not used" in caplog.text
    assert place.carry_out(lease, settlement_of(messages)) == SettleReport(acked=1)
    assert place.first(place.queues.held(0))[1] == garbage


def test_an_unreadable_bundle_stays_and_the_others_are_released(place, caplog):
    messages = hold_by_dead_run(place, "dead", 3)
    with place.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish("", place.queues.held(0), NEWER)
    await_lapse(place)

    taken, _ = place.settle("next")

    assert sorted(ids(taken)) == sorted(ids(messages))
    assert "format version 9" in caplog.text
    assert place.first(place.queues.held(0))[1] == NEWER


def test_a_bundle_names_its_owner(place):
    place.send(b"1")
    place.hold("g1")

    opening, _ = unpack(place.first(place.queues.held(0))[1])
    bundle, messages = unpack(place.first(place.queues.held(0))[1])

    assert (opening.generation, opening.count, opening.queue) == ("g1", 0, place.name)
    assert (bundle.generation, bundle.count, bundle.until) == ("g1", 1, opening.until)
    assert [held.body for held in messages] == [b"1"]


# -- released messages -----------------------------------------------------------------------------


def test_released_messages_arrive_despite_latency(place):
    sent = place.send_released(*[b"%d" % number for number in range(10)])

    with (
        Breaker(place.server.address, delay=0.03) as breaker,
        place.source(uri=breaker.uri, on_failure="retry") as source,
    ):
        messages = source.receive(100, timeout=0.0)

    assert sorted(m.message_id for m in messages) == sorted(m.message_id for m in sent)


def test_ids_of_released_messages_are_not_reused(place):
    # Given a message that was released, and others with a copy of its mark
    copied = pika.BasicProperties(headers=marked(b"same", "copied"))
    [first] = place.send_released(b"same", properties=copied)
    place.send(b"same", b"other", b"same", properties=copied)

    # When one run receives them all, and only the first of them succeeds
    retry = Verdict(Action.RETRY, 0.0, "again", "process")
    messages, report = place.settle("g1", {1: retry, 2: retry, 3: retry})

    # Then each is a separate message with its own verdict
    assert first.message_id == "copied"
    assert sorted(message.data for message in messages) == [b"other", b"same", b"same", b"same"]
    assert len({message.message_id for message in messages}) == 4
    assert report == SettleReport(acked=1, requeued=3)
    assert len(place.settle("g2")[0]) == 3


def test_concurrent_runs_sweep_a_dead_run_once(place, caplog):
    caplog.set_level(logging.WARNING)
    messages = hold_by_dead_run(place, "dead", 600)
    await_lapse(place)
    barrier, received = threading.Barrier(2), []

    def run(generation: str) -> None:
        barrier.wait(30)
        received.extend(place.settle(generation, on_failure="retry")[0])

    threads = [threading.Thread(target=run, args=(f"g{number}",)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    received += place.settle("rest")[0]

    assert sorted(ids(received)) == sorted(ids(messages))
    assert caplog.text.count("has ended and left 600 messages") == 1
    assert QueueJournal(place.env().staging, place.name).is_over("dead")
