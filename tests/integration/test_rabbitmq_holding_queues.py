"""Holding queues at a real broker: opened, fenced off, settled, swept and used again."""

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

#: The frames by which a bundle is published.
BUNDLE = b"application/x-broadway-bundle"


@contextmanager
def connected(place: Place) -> Iterator[ConnectionThread]:
    connection = ConnectionThread.to(address_for(place.producer(), place.env()))
    try:
        yield connection
    finally:
        connection.close()


def die(place: Place, generation: str, count: int, **options: Any) -> list[Message]:
    """Takes messages, as a run that dies before its manifest and whose lease then lapses."""
    place.send(*[b"%06d" % number for number in range(count)])
    messages, _ = place.hold(generation, lease=3.0, on_failure="retry", **options)
    assert len(messages) == count
    return messages


def atoms(place: Place) -> int:
    """The Erlang atoms of the node.  Each call of ``rabbitmqctl eval`` costs some itself."""
    text = place.server.evaluate("erlang:system_info(atom_count).")
    return int(text)


# -- used again ------------------------------------------------------------------------------------


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
    with connected(place) as connection:

        def run(generation: str) -> None:
            """Open, settle and free, as a run does."""
            nonlocal body
            header = Header(
                bundle=f"{generation}.0",
                generation=generation,
                queue=place.name,
                count=0,
                until=2e9,
            )
            body = pack(header, [])
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
        atoms(place)
        before = atoms(place)
        for number in range(runs):
            run(f"run-{number}")
        assert abs(atoms(place) - before) <= 20


# -- a dead run ------------------------------------------------------------------------------------


def test_a_dead_runs_messages_are_taken_over_from_its_holding_queue(place):
    messages = die(place, "dead", 1_200)
    [(name, bundles)] = [
        (name, place.depth(name))
        for name in place.server.queue_names("broadway.held.")
        if place.name in name and not name.endswith(".claim") and place.depth(name)
    ]
    assert (name, bundles) == (place.queues.held(0), 4)
    eventually(lambda: place.producer().depth(place.env("look")).ready == 3)

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
    messages = die(place, "dead", 3)
    eventually(lambda: place.producer().depth(place.env("look")).ready == 1)
    place.folder = place.folder / "renamed"

    assert sorted(ids(place.settle("next")[0])) == sorted(ids(messages))


def test_a_sweep_that_is_killed_is_completed_by_the_next(place, monkeypatch):
    messages = die(place, "dead", 1_200)
    eventually(lambda: place.producer().depth(place.env("look")).ready == 3)

    def killed(queue: HoldingQueue) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as patch:
        patch.setattr(HoldingQueue, "free", killed)
        with pytest.raises(SystemExit), place.source("killed"):
            pass
    taken, _ = place.settle("next")

    assert {message.data for message in taken} == {message.data for message in messages}
    assert all(message.redelivered for message in taken)


def test_a_run_stopped_before_its_sweep_forgets_no_settlement(place):
    # Given a settlement of ten days ago that was killed before the queue was emptied
    place.send(b"1")
    _, lease = place.hold("old")
    env = place.env("next")
    journal = QueueJournal(env.staging, place.name)
    journal.note_opened("old", place.queues.held(0), lease.deadline - timedelta(days=10))
    journal.note_settled("old", SettleReport(acked=1), None)

    # When a run stops as it begins
    place.producer().source(replace(env, stopping=lambda: True)).close()

    # Then a later one knows that nothing of it is to be handled again
    assert journal.log_of("old").settled() is not None
    assert place.settle("later")[0] == []
    assert place.depth(place.queues.held(0)) == 0


def held_behind_a_full_queue(place: Place) -> tuple[Sequence[Message], Lease]:
    """Holds the one message that the source queue has room for, and fills its room with another."""
    with place.channel() as channel:
        channel.queue_delete(place.name)
    place.declare(**{"x-max-length": 1, "x-overflow": "reject-publish"})
    place.send(b"1")
    messages, lease = place.hold("g1")
    place.send(b"in the way")
    return messages, lease


def test_messages_rejected_by_a_full_source_stay_in_the_holding_queue(place, caplog):
    # Given a source queue that has room for one message, which another takes
    messages, lease = held_behind_a_full_queue(place)

    # When the first is released
    report = place.carry_out(lease, Settlement(rest=RELEASE))

    # Then it could not be settled, and the next run that finds room has it
    assert (report.released, report.failed) == (0, 1)
    assert place.depth(lease.state["holding_queue"]) == 1
    with place.source("in between"):
        pass
    assert "In the holding queue" in caplog.text
    assert place.first(place.name)[1] == b"in the way"
    assert ids(place.settle("next")[0]) == ids(messages)
    assert place.depth(lease.state["holding_queue"]) == 0


def test_released_messages_are_not_purged_while_counts_lag(place, monkeypatch):
    # Given a message that is to be retried, and a source queue that has no room for it
    messages, lease = held_behind_a_full_queue(place)
    monkeypatch.setattr(HoldingQueue, "count", lambda *_: lease.state["bundles"])

    # When the count does not include the requeued message yet
    retry = Verdict(Action.RETRY, 0.0, "again", "process")
    report = place.carry_out(lease, settlement_of(messages, {messages[0].message_id: retry}))
    monkeypatch.undo()

    # Then the next run that finds room has it
    assert report.failed == 1
    assert place.first(place.name)[1] == b"in the way"
    assert ids(place.settle("next")[0]) == ids(messages)


@pytest.mark.parametrize("noted", [False, True], ids=["before", "as it opens its queue"])
def test_a_generation_swept_before_its_first_message_cannot_begin(place, noted):
    with place.source("g1") as source:
        opened = source.lease
        if noted:  # and loses its connection
            journal = QueueJournal(place.env().staging, place.name)
            journal.note_opened("g1", place.queues.held(0), opened.deadline)
        assert place.carry_out(opened, Settlement(rest=RELEASE)) == SettleReport()
        place.send(b"1")

        with pytest.raises(LeaseLapsed, match="released before its first message"):
            source.receive(10, timeout=5.0)

        assert list(source.stop()) == []
    assert [message.data for message in place.settle("g2")[0]] == [b"1"]
    assert place.depth(place.queues.held(0)) == 0


def receive_until_lapsed(source: Source) -> LeaseLapsed:
    """Receives until the lease is said to be over."""
    for _ in range(200):
        try:
            source.receive(1_000, timeout=0.5)
        except LeaseLapsed as error:
            return error
    raise AssertionError("it went on")


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
            waking = threading.Thread(target=breaker.release)
            ended: list[LeaseLapsed] = []
            receiving = threading.Thread(target=lambda: ended.append(receive_until_lapsed(source)))
            receiving.start()
            assert breaker.holds.wait(30)
            report = place.carry_out(source.lease, Settlement(rest=RELEASE))
            assert report == SettleReport(released=1)

            # When it wakes
            waking.start()
            receiving.join(60)
            waking.join()

            # Then its bundle is returned to it, and it acknowledges nothing
            assert len(ended) == 1
            assert list(source.stop()) == []
    assert place.depth(place.queues.held(0)) == 0
    rest, _ = place.settle("next")
    assert sorted(message.data for message in rest) == [b"1", b"2", b"3"]


def test_a_lapsed_publisher_is_fenced_off_by_the_sweep(place):
    messages = die(place, "dead", 3)
    eventually(lambda: place.producer().depth(place.env("look")).ready == 1)

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
        released = threading.Thread(
            target=lambda: place.carry_out(source.lease, Settlement(rest=RELEASE))
        )
        released.start()
        with suppress(LeaseLapsed):  # unless it had received all of them before the unbind
            while source.receive(1_000, timeout=0.5) or released.is_alive():
                pass
        released.join()

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


def late_bundle(place: Place) -> None:
    """Publishes a bundle that was under way when its generation was fenced off."""
    late = Header(bundle="late.1", generation="g0", queue=place.name, count=1, until=1.0)
    body = pack(late, [Held("m0", 1, False, b"\0\0", b"\0\0", b"late")])
    with place.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish("", place.queues.held(0), body)


@pytest.mark.parametrize("noted", [False, True], ids=["before it settles", "before it purges"])
def test_foreign_bundles_stay_for_the_sweep(place, noted, monkeypatch):
    place.send(b"1")
    messages, lease = place.hold("g1")
    if noted:
        note = QueueJournal.note_settled

        def note_then_late(*given: Any, **about: Any) -> Any:
            late_bundle(place)
            return note(*given, **about)

        monkeypatch.setattr(QueueJournal, "note_settled", note_then_late)
    else:
        late_bundle(place)

    assert place.carry_out(lease, settlement_of(messages)) == SettleReport(acked=1)
    monkeypatch.undo()

    taken, _ = place.settle("g2")
    assert [(m.message_id, m.data, m.redelivered) for m in taken] == [("m0", b"late", True)]
    assert place.depth(place.queues.held(0)) == 0


def test_opening_another_queue_unbinds_the_first(place):
    # Given a generation that lost its connection when it was bound, and another in its queue by now
    holding, declare = HoldingQueues(place.queues), place.standing_queues().ensure_held
    first, second = place.queues.held(0), place.queues.held(1)
    with connected(place) as connection, place.channel() as channel:

        def open_queue(generation: str, earlier: str = "") -> str:
            header = Header(
                bundle=f"{generation}.0",
                generation=generation,
                queue=place.name,
                count=0,
                until=2e9,
            )
            body = pack(header, [])
            return holding.open(
                connection, declare, generation, body, earlier=earlier, note=lambda name: None
            )

        assert open_queue("other") == first
        channel.queue_bind(first, EXCHANGE, place.queues.key("g1"))

        # When it goes on
        assert open_queue("g1", earlier=first) == second
        channel.confirm_delivery()
        channel.basic_publish(EXCHANGE, place.queues.key("g1"), b"bundle", mandatory=True)

    # Then its bundles are in its own queue alone
    assert (place.depth(first), place.depth(second)) == (1, 2)


def test_a_claim_ends_with_its_connection(place):
    name, holding = place.queues.held(0), HoldingQueues(place.queues)
    with connected(place) as one, connected(place) as other:
        with holding.claim(one, name) as claimed, holding.claim(other, name) as refused:
            assert claimed is not None
            assert refused is None
        with holding.claim(one, name):
            one.close()
            with holding.claim(other, name, 5.0) as claimed:
                assert claimed is not None


# -- what others put there -------------------------------------------------------------------------

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
    messages = die(place, "dead", 3)
    with place.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish("", place.queues.held(0), NEWER)
    eventually(lambda: place.producer().depth(place.env("look")).ready == 2)

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
    sent = place.give_back(*[b"%d" % number for number in range(10)])

    with (
        Breaker(place.server.address, delay=0.03) as breaker,
        place.source(uri=breaker.uri, on_failure="retry") as source,
    ):
        messages = source.receive(100, timeout=0.0)

    assert sorted(m.message_id for m in messages) == sorted(m.message_id for m in sent)


def test_ids_of_released_messages_are_not_reused(place):
    # Given a message that was released, and others that bear a copy of its mark
    copied = pika.BasicProperties(headers=marked(b"same", "copied"))
    [first] = place.give_back(b"same", properties=copied)
    place.send(b"same", b"other", b"same", properties=copied)

    # When one run takes them all, and only the first of them succeeds
    retry = Verdict(Action.RETRY, 0.0, "again", "process")
    messages, report = place.settle("g1", {1: retry, 2: retry, 3: retry})

    # Then each is a message of its own, with a verdict of its own
    assert first.message_id == "copied"
    assert sorted(message.data for message in messages) == [b"other", b"same", b"same", b"same"]
    assert len({message.message_id for message in messages}) == 4
    assert report == SettleReport(acked=1, requeued=3)
    assert len(place.settle("g2")[0]) == 3


def test_concurrent_runs_sweep_a_dead_run_once(place, caplog):
    caplog.set_level(logging.WARNING)
    messages = die(place, "dead", 600)
    eventually(lambda: place.producer().depth(place.env("look")).ready == 2)
    barrier, found = threading.Barrier(2), []

    def run(generation: str) -> None:
        barrier.wait(30)
        found.extend(place.settle(generation, on_failure="retry")[0])

    both = [threading.Thread(target=run, args=(f"g{number}",)) for number in range(2)]
    for source in both:
        source.start()
    for source in both:
        source.join()
    found += place.settle("rest")[0]

    assert sorted(ids(found)) == sorted(ids(messages))
    assert caplog.text.count("has ended and left 600 messages") == 1
    assert QueueJournal(place.env().staging, place.name).is_over("dead")
