"""``airflow-broadway check`` and ``dead-letters`` of a Pub/Sub subscription."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.producers.pubsub import PubSubProducer
from tests.cli_runs import Ran, ran
from tests.pubsub_server import PubSubServer
from tests.unit.passing import Passing
from tests.unit.producers.pubsub.kit import Generation

pytestmark = pytest.mark.broker

Capsys = pytest.CaptureFixture[str]


class Subscribed(Passing):
    producer = PubSubProducer(subscription="{{ params.subscription }}")


class SubscriptionCommands:
    """A subscription, and commands on it.

    :param settings: Settings of the subscription.
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

    def check(self, **options: Any) -> Ran:
        _, reference, *staging = self._arguments(**options)
        return ran(self.capsys, "check", "--pipeline", reference, *staging)

    def letters(self, action: str, *arguments: str) -> Ran:
        return ran(self.capsys, "dead-letters", action, *self._arguments(), *arguments)

    def _arguments(self, **options: Any) -> tuple[str, ...]:
        producer = {**self.options, **options}
        reference = {"class": f"{__name__}:Subscribed", "options": {"producer": producer}}
        return ("--pipeline", json.dumps(reference), "--staging", f"file://{self.root}")


def test_check_reports_the_next_runs_findings(pubsub, tmp_path, capsys):
    cli = SubscriptionCommands(pubsub, tmp_path, capsys)
    fine = cli.check()
    assert (fine.code, fine.out.splitlines()[-1]) == (0, "A run of Subscribed can begin.")
    assert "error" not in fine.out
    assert "warning" not in fine.out
    wrong = cli.check(message_ordering=True)
    assert wrong.code == 1
    assert "error: message_ordering=True needs a subscription that delivers in order" in wrong.out


def test_a_subscription_that_does_not_exist_is_an_error(pubsub, tmp_path, capsys):
    cli = SubscriptionCommands(pubsub, tmp_path, capsys)
    done = cli.check(subscription="projects/broadway-tests/subscriptions/gone")
    assert (done.code, "error: there is no subscription" in done.out) == (1, True)


def test_dead_letters_are_listed_shown_requeued_and_deleted(pubsub, tmp_path, capsys):
    cli = SubscriptionCommands(pubsub, tmp_path, capsys)
    dead = pubsub.topic()
    pubsub.subscription(dead, dead.rpartition("/")[2])
    cli.options["dead_letter"] = dead
    pubsub.publish(cli.topic, [b"a", b"b"])
    run = cli.generation("g")
    messages = run.take()
    verdict = Verdict(Action.DEAD_LETTER, 0.0, "ValueError: why", "process")
    assert run.settle(messages, {"a": verdict, "b": verdict}).dead_lettered == 2
    run.close()
    first, second = (message.message_id for message in messages)

    listed = cli.letters("list", "--json")
    letters = {letter["original_id"]: letter["message_id"] for letter in json.loads(listed.out)}
    assert letters.keys() == {first, second}
    shown = cli.letters("show", letters[first])
    assert (shown.code, "ValueError: why" in shown.out) == (0, True)
    requeued = cli.letters("requeue", "--message-id", letters[first])
    assert (requeued.code, "Requeued 1 dead letter from" in requeued.out) == (0, True)
    deleted = cli.letters("delete", "--all")
    assert (deleted.code, "Deleted 1 dead letter of" in deleted.out) == (0, True)

    assert "No dead letters in subscription" in cli.letters("list").out
    [again] = cli.generation("h").take()
    assert (again.redelivered, again.attempt) == (True, 1)
    assert again.metadata["attributes"] == {"broadway_requeued": first}
