"""What strangers at a real broker and in the staging folder can make a run do to queues."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pika
import pytest

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.broker.names import QueueNames, lease_arguments
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.testing.contract import settlement_of
from tests.rabbitmq_place import Place, marked, permitted

pytestmark = pytest.mark.broker

GUIDE = Path(__file__).parents[2] / "docs" / "rabbitmq.md"


@pytest.fixture
def victim(place: Place) -> Iterator[str]:
    """Another pipeline's queue for dead letters, empty as yet."""
    queues = QueueNames(f"victim-{uuid.uuid4().hex}")
    with place.channel() as channel:
        channel.queue_declare(queues.dead, durable=True, arguments=queues.returns_arguments())
        yield queues.dead
        channel.queue_delete(queues.dead)


def guide_permissions(queue: str) -> dict[str, str]:
    """What the guide grants, for another queue than ``orders``."""
    [block] = re.findall(r"set_permissions -p / airflow \\\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    patterns = [text.replace("orders", re.escape(queue)) for text in re.findall("'(.*)'", block)]
    return dict(zip(("configure", "write", "read"), patterns, strict=True))


def run(
    place: Place, generation: str, *verdicts: Verdict, **user: str
) -> tuple[list[Message], SettleReport, str]:
    """One run as a user: its messages, its report and its lease queue.

    :param verdicts: For its messages, one after another.
    """
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit", on_failure="retry")
    source = producer.source(place.env(generation, **user))
    try:
        messages = place.take(source)
        lease = source.lease
    finally:
        source.close()
    custodian = producer.custodian(place.env("custodian", **user))
    try:
        chosen = {m.message_id: v for m, v in zip(messages, verdicts, strict=False)}
        report = custodian.settle(lease, settlement_of(messages, chosen))
    finally:
        custodian.close()
    return messages, report, str(lease.state["lease_queue"])


def spares_of(place: Place) -> str:
    return QueueNames(place.name).spares(21600.0)


def forge(place: Place, *names: object, **user: str) -> None:
    """Be a sender who may write to every queue, and name lease queues for the runs to come."""
    login = pika.PlainCredentials(user["login"], user["password"])
    with pika.BlockingConnection(
        pika.ConnectionParameters(place.host, place.port, credentials=login)
    ) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for name in names:
            body = name if isinstance(name, bytes) else json.dumps({"queue": name}).encode()
            channel.basic_publish("", spares_of(place), body, mandatory=True)


GUEST = {"login": "guest", "password": "guest"}


def test_the_guides_user_may_do_all_that_runs_do(place: Place) -> None:
    # Given a run with the permissions that the guide grants
    place.declare()
    place.send(b"1", b"2", b"3", b"4")

    with permitted(place.server, tags="management", **guide_permissions(place.name)) as user:
        verdicts = (Action.ACK, Action.RETRY, Action.DEAD_LETTER, Action.RELEASE)
        _, report, _ = run(place, "g1", *(Verdict(each, 60.0) for each in verdicts), **user)

        # When the next takes the lease queue that was left for it
        spare = json.loads(place.get(spares_of(place))[1])["queue"]  # type: ignore[index]
        forge(place, spare, **GUEST)
        messages, again, used = run(place, "g2", **user)

    # Then nothing was refused
    assert report == SettleReport(acked=1, requeued=1, dead_lettered=1, released=1)
    assert [message.data for message in messages] == [b"4"]
    assert again == SettleReport(acked=1)
    assert used == spare


def test_the_guides_user_may_not_touch_the_queues_of_another_source(
    place: Place, victim: str
) -> None:
    place.declare()

    with permitted(place.server, tags="management", **guide_permissions(place.name)) as user:
        login = pika.PlainCredentials(user["login"], user["password"])
        for forbidden in ("basic_get", "queue_purge", "queue_delete"):
            with (
                pika.BlockingConnection(
                    pika.ConnectionParameters(place.host, place.port, credentials=login)
                ) as connection,
                pytest.raises(pika.exceptions.ChannelClosedByBroker, match="ACCESS_REFUSED"),
            ):
                getattr(connection.channel(), forbidden)(victim)


NAMES: dict[str, Callable[[Place, str], object]] = {
    "another pipeline's queue": lambda place, victim: victim,
    "our own returns queue": lambda place, victim: place.queues.returns,
    "the source queue": lambda place, victim: place.name,
    "no name": lambda place, victim: None,
    "no token": lambda place, victim: b"\xff{",
    "a lease queue that is not there": lambda place, victim: place.queues.lease("nobody's"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_sender_does_not_choose_the_lease_queue_of_a_run(
    place: Place, victim: str, kind: str
) -> None:
    # Given a pipeline whose user has what the guide grants, and a sender who may publish by the
    # default exchange and nothing else
    place.declare()
    place.send(b"1")
    with (
        permitted(place.server, tags="management", **guide_permissions(place.name)) as airflow,
        permitted(place.server, configure="^$", write=r"^amq\.default$", read="^$") as sender,
    ):
        run(place, "g1", **airflow)
        with place.channel() as channel:
            channel.queue_purge(spares_of(place))

        # When the sender names a queue to the next run
        named = NAMES[kind](place, victim)
        forge(place, named, **sender)
        place.send(b"2")
        messages, report, used = run(place, "g2", **airflow)

    # Then the run takes a lease queue of its own, and deletes no other
    assert [message.data for message in messages] == [b"2"]
    assert report == SettleReport(acked=1)
    assert used == place.queues.lease("g2")
    assert place.depth(victim) == 0
    assert place.depth(place.queues.returns) is not None
    if isinstance(named, str) and ".lease." in named:
        assert place.depth(named) is None


def test_a_queue_with_a_lease_queues_name_and_other_arguments_is_passed_over(place: Place) -> None:
    place.declare()
    place.send(b"1")
    impostor = place.queues.lease("impostor")
    with place.channel() as channel:
        channel.queue_declare(impostor, durable=True, arguments=lease_arguments(place.queues, 60))
        run(place, "g1", **GUEST)
        channel.queue_purge(spares_of(place))
    forge(place, impostor, **GUEST)
    place.send(b"2")

    _, report, used = run(place, "g2", **GUEST)

    assert report == SettleReport(acked=1)
    assert used != impostor
    assert place.depth(impostor) == 0


def test_a_lease_queue_that_another_run_holds_is_never_shared(place: Place) -> None:
    # Given a run that holds messages, and one that gets its lease queue's name
    place.declare()
    place.send(b"1")
    run(place, "g0", **GUEST)
    first = place.producer().source(place.env("g1"))
    place.send(b"2")
    try:
        [held] = place.take(first)
        assert first.stop() == []
        name = str(first.lease.state["lease_queue"])
        forge(place, name, name, **GUEST)
        # … as if its bundles were on their way
        with place.channel() as channel:
            method, _, _body = next(channel.consume(name))
            assert method.delivery_tag
            assert place.depth(name) == 0
            place.send(b"3")

            # When the other runs
            _, report, used = run(place, "g2", **GUEST)
        lease = first.lease
    finally:
        first.close()

    # Then it has one of its own, and each settles its own message
    assert used != name
    assert report == SettleReport(acked=1)
    assert place.carry_out(lease, settlement_of([held])) == SettleReport(acked=1)


# -- the staging folder ----------------------------------------------------------------------------


def test_a_file_in_staging_does_not_have_another_queue_swept(
    place: Place, victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    place.declare()
    journal = QueueJournal(f"file://{place.folder}", place.name)
    journal.note_opened("forged", victim, due=1.0, sure=1.0)

    with place.source("g1"):
        pass

    assert place.depth(victim) == 0
    assert f"{victim!r} is no lease queue of {place.name!r}" in caplog.text
    caplog.clear()
    with place.source("g2"):
        pass
    assert "is no lease queue" not in caplog.text


@pytest.mark.parametrize("where", ["journal", "lease"])
def test_a_lease_that_names_another_queue_is_not_settled_on_it(
    place: Place, victim: str, where: str
) -> None:
    # Given a run whose lease queue another name has been put in place of
    place.declare()
    place.send(b"1")
    messages, lease = place.hold("g1")
    if where == "lease":
        lease = dataclasses.replace(lease, state={**lease.state, "lease_queue": victim})
        shutil.rmtree(place.folder / "rabbitmq")
    else:
        QueueJournal(f"file://{place.folder}", place.name).note_opened(
            "g1", victim, due=1e12, sure=1e12
        )
    with place.channel() as channel:
        channel.basic_publish("", victim, b"somebody's")

    # When it is settled, in whatever way
    for settlement in (settlement_of(messages), Settlement(rest=RELEASE)):
        with pytest.raises(ProducerError, match=rf"'{victim}' is no lease queue of"):
            place.carry_out(lease, settlement)

    # Then the other queue has what it had
    assert place.depth(victim) == 1


def test_names_of_generations_that_strangers_make_up_keep_no_connection_waiting(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given messages with marks of two generations, and others that bear copies of such marks
    place.declare()
    proper = [marked(b"proper", f"m{n}", giver=f"giver-{n % 2}") for n in range(20)]
    copied = [marked(b"another", f"c{n}", giver=f"stranger-{n}") for n in range(50)]
    for headers in (*proper, *copied):
        place.send(b"proper", properties=pika.BasicProperties(headers=headers))
    inside = QueueJournal.turns
    read: list[tuple[str, str]] = []

    def turns(journal: QueueJournal, generation: str) -> frozenset[str]:
        read.append((threading.current_thread().name, generation))
        return inside(journal, generation)

    monkeypatch.setattr(QueueJournal, "turns", turns)

    messages, report = place.settle("g1")

    # Then each proper one's journal is read once, and not by the thread that answers heartbeats
    assert report == SettleReport(acked=70)
    assert {f"m{n}" for n in range(20)} < {message.message_id for message in messages}
    assert all(message.redelivered for message in messages)
    here = threading.current_thread().name
    assert sorted(read) == [(here, "giver-0"), (here, "giver-1")]
