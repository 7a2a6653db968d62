"""``airflow-broadway pubsub``: what it shows of a subscription, what it finds wrong, a seek."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.sqlite import SqliteProducer
from tests.cli_runs import Ran, ran
from tests.pubsub_server import PubSubServer
from tests.unit.passing import Passing
from tests.unit.producers.pubsub.kit import Generation

pytestmark = pytest.mark.broker

Capsys = pytest.CaptureFixture[str]


class Subscribed(Passing):
    producer = PubSubProducer(subscription="{{ params.subscription }}")


class Embedded(Passing):
    producer = SqliteProducer(queue="orders", path="/nowhere/queue.db")


class Told:
    """A subscription, and the command about it.

    :param settings: Of the subscription.
    """

    def __init__(self, server: PubSubServer, root: Path, capsys: Capsys, **settings: Any) -> None:
        root.mkdir(exist_ok=True)
        self.server, self.root, self.capsys = server, root, capsys
        self.topic = server.topic()
        self.name = server.subscription(self.topic, **settings)
        self.options: dict[str, Any] = {
            "subscription": self.name,
            "endpoint": f"http://{server.host}",
            "receive_timeout": 0.3,
        }

    def generation(self, generation: str) -> Generation:
        env = ProducerEnv(
            pipeline="Subscribed", generation=generation, shared=f"file://{self.root}/.shared"
        )
        return Generation(PubSubProducer(**self.options), env)

    def ran(self, action: str, *arguments: str, **options: Any) -> Ran:
        return ran(self.capsys, "pubsub", action, *self._about(**options), *arguments)

    def check(self, **options: Any) -> Ran:
        _, reference, *staging = self._about(**options)
        return ran(self.capsys, "check", reference, *staging)

    def letters(self, action: str, *arguments: str) -> Ran:
        return ran(self.capsys, "dead-letters", action, *self._about(), *arguments)

    def _about(self, **options: Any) -> tuple[str, ...]:
        producer = {**self.options, **options}
        reference = {"class": f"{__name__}:Subscribed", "options": {"producer": producer}}
        return ("--pipeline", json.dumps(reference), "--staging", f"file://{self.root}")

    def seek(self, *where: str) -> Ran:
        return self.ran("seek", "--subscription", self.name.split("/")[-1], *where)


def test_a_subscription_is_shown_with_who_holds_what(
    pubsub: PubSubServer, tmp_path: Path, capsys: Capsys
) -> None:
    told = Told(pubsub, tmp_path, capsys, ack_deadline_seconds=20)
    pubsub.publish(told.topic, [b"a", b"b"])
    run = told.generation("g")
    assert len(run.take()) == 2
    run.source.stop()

    shown = told.ran("show")

    assert shown.code == 0
    assert f"subscription: {told.name}" in shown.out
    assert "ack deadline: 20 s" in shown.out
    assert "How much waits is not known" in shown.out  # never 0
    found = json.loads(told.ran("show", "--json").out)
    assert [each["messages"] for each in found["held"]] == [2]
    assert found["depth"] is None
    run.close()


def test_what_the_next_run_would_say_is_found_before(
    pubsub: PubSubServer, tmp_path: Path, capsys: Capsys
) -> None:
    told = Told(pubsub, tmp_path, capsys)
    fine = told.check()
    assert (fine.code, fine.out) == (0, "A run of Subscribed can begin.\n")
    wrong = told.check(message_ordering=True)
    assert wrong.code == 1
    assert "error: message_ordering=True needs a subscription that delivers in order" in wrong.out


def test_a_seek_is_refused_while_runs_hold_messages_and_brings_them_again_afterwards(
    pubsub: PubSubServer, tmp_path: Path, capsys: Capsys
) -> None:
    told = Told(pubsub, tmp_path, capsys)
    snapshot = f"snap-{told.name[-36:]}"
    pubsub.publish(told.topic, [b"a"])
    full = f"projects/broadway-tests/snapshots/{snapshot}"
    pubsub.subscriber.create_snapshot(request={"name": full, "subscription": told.name})
    run = told.generation("g")
    found = run.take()

    refused = told.seek("--snapshot", snapshot)
    assert refused.code == 2
    assert "runs hold 1 message" in refused.err
    run.source.stop()
    assert run.settle(found).acked == 1
    assert pubsub.drain(told.name) == []

    assert told.seek("--snapshot", snapshot).code == 0
    assert len(pubsub.drain(told.name)) == 1
    run.close()


def test_a_seek_to_a_time_in_the_future_is_done_with_all_there_is(
    pubsub: PubSubServer, tmp_path: Path, capsys: Capsys
) -> None:
    told = Told(pubsub, tmp_path, capsys)
    pubsub.publish(told.topic, [b"a"])
    then = SystemClock().now() + timedelta(minutes=5)
    assert told.seek("--time", then.isoformat()).code == 0
    assert pubsub.drain(told.name) == []


def test_what_cannot_be_is_said_and_changes_nothing(
    pubsub: PubSubServer, tmp_path: Path, capsys: Capsys
) -> None:
    told = Told(pubsub, tmp_path, capsys)
    for given, words in (
        (("--subscription", "other", "--snapshot", "x-1"), "names 'other': nothing was changed"),
        (
            ("--subscription", told.name, "--time", "2026-01-31T08:00:00"),
            "is no instant with its time zone",
        ),
        (("--subscription", told.name, "--snapshot", "none-1"), "there is no snapshot"),
    ):
        refused = told.ran("seek", *given)
        assert refused.code == 2
        assert words in refused.err
    staging = ("--staging", f"file://{tmp_path}")
    embedded = ran(capsys, "pubsub", "show", "--pipeline", f"{__name__}:Embedded", *staging)
    assert "is SqliteProducer, not PubSubProducer" in embedded.err
    template = ran(capsys, "pubsub", "show", "--pipeline", f"{__name__}:Subscribed", *staging)
    assert "has the template" in template.err
    gone = told.check(subscription="projects/broadway-tests/subscriptions/gone")
    assert (gone.code, "error: there is no subscription" in gone.out) == (1, True)


def test_dead_letters_are_listed_shown_sent_back_and_deleted(
    pubsub: PubSubServer, tmp_path: Path, capsys: Capsys
) -> None:
    told = Told(pubsub, tmp_path, capsys)
    dead = pubsub.topic()
    pubsub.subscription(dead, dead.rpartition("/")[2])
    told.options["dead_letter"] = dead
    pubsub.publish(told.topic, [b"a", b"b"])
    run = told.generation("g")
    messages = run.take()
    verdict = Verdict(Action.DEAD_LETTER, 0.0, "ValueError: why", "process")
    assert run.settle(messages, {"a": verdict, "b": verdict}).dead_lettered == 2
    run.close()
    one, two = (message.message_id for message in messages)

    listed = told.letters("list", "--json")
    letters = {each["original_id"]: each["message_id"] for each in json.loads(listed.out)}
    assert letters.keys() == {one, two}
    shown = told.letters("show", letters[one])
    assert (shown.code, "ValueError: why" in shown.out) == (0, True)
    sent = told.letters("requeue", "--message-id", letters[one])
    assert (sent.code, "Sent 1 dead letter back" in sent.out) == (0, True)
    gone = told.letters("delete", "--all")
    assert (gone.code, "Deleted 1 dead letter of" in gone.out) == (0, True)

    assert "No dead letters in subscription" in told.letters("list").out
    [again] = told.generation("h").take()
    assert (again.redelivered, again.attempt) == (True, 1)
    assert again.metadata["attributes"] == {"broadway_requeued": one}
