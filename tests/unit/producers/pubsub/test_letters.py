"""Dead letters of Pub/Sub: listing, requeueing, and letters of Pub/Sub's own policy."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_broadway.core.custody.dead_letters import Choice, DeadLetter, Moved
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.model.run_source import DEAD_LETTERS, RunSource
from airflow_broadway.producers.kit.looks import RESERVE
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.runs.sources.dead_letters import move_letters
from tests.pubsub_server import PROJECT
from tests.unit.passing import Passing
from tests.unit.producers.halves import DEAD
from tests.unit.producers.pubsub.kit import SubscriptionHarness, open_subscription

REASON = DEAD._replace(reason="ValueError: why")
TOPIC = f"projects/{PROJECT}/topics/dead"
#: The prefix of attributes that Pub/Sub adds when its own policy dead-letters a message.
GOOGLE = "CloudPubSubDeadLetterSource"


@pytest.fixture
def sub():
    with open_subscription() as subscription:
        subscription.server.subscription(subscription.server.topic("dead"), "dead")
        yield subscription


def opened(
    sub: SubscriptionHarness,
    name: str | None = None,
    env: ProducerEnv | None = None,
    **options: Any,
) -> Any:
    producer = PubSubProducer(
        subscription=sub.name,
        endpoint=f"http://{sub.server.host}",
        receive_timeout=5.0,
        **{"dead_letter": "dead", **options},
    )
    return closing(producer.dead_letters(env or ProducerEnv(clock=sub.clock), place=name))


def listed(sub: SubscriptionHarness, name: str | None = None, **options: Any) -> list[DeadLetter]:
    with opened(sub, name, **options) as letters:
        return list(letters.letters())


def requeued(sub: SubscriptionHarness) -> Any:
    with opened(sub) as letters:
        return letters.requeue()


def dead_letter_by_policy(sub: SubscriptionHarness, body: bytes, **attributes: str) -> str:
    """Publishes a dead letter as Pub/Sub's own policy does."""
    policy = {
        f"{GOOGLE}Subscription": sub.name.rpartition("/")[2],
        f"{GOOGLE}SubscriptionProject": PROJECT,
        f"{GOOGLE}DeliveryCount": "10",
        f"{GOOGLE}TopicPublishTime": "2026-01-31T12:00:00.000+00:00",
        **attributes,
    }
    [key] = sub.server.publish(TOPIC, [body], attributes=policy)
    return key


def test_requeued_message_keeps_attributes_and_key_and_is_marked(sub):
    # Given a message that died
    sub.put("order", attributes={"colour": "red"}, ordering_key="k")
    run = sub.begin(dead_letter="dead")
    [first] = run.take()
    assert run.settle([first], {"order": REASON}).dead_lettered == 1

    # When it is listed and requeued
    [letter] = listed(sub)
    assert requeued(sub) == Moved(1)

    # Then it was listed unchanged
    assert (letter.original_id, letter.body) == (first.message_id, b"order")
    assert letter.properties == {"attributes": {"colour": "red"}, "orderingKey": "k"}
    assert (letter.reason, letter.stage, letter.attempt) == ("ValueError: why", "process", 1)
    assert letter.origin == sub.name
    # and is redelivered with the mark
    [again] = sub.begin().take()
    assert (again.attempt, again.redelivered) == (1, True)
    assert again.metadata["attributes"] == {
        "colour": "red",
        "broadway_requeued": letter.original_id,
    }
    assert again.metadata["orderingKey"] == "k"
    assert listed(sub) == []


def test_second_dead_letter_has_no_first_mark(sub):
    sub.put("order")
    for _ in range(2):
        run = sub.begin(dead_letter="dead")
        messages = run.take()
        run.settle(messages, {"order": REASON})
        [letter] = listed(sub)
        assert letter.original_id == messages[0].message_id
        assert letter.properties["attributes"] == {}
        assert requeued(sub).count == 1


def test_dead_letter_of_policy_is_requeued_to_origin(sub):
    key = dead_letter_by_policy(sub, b"late", colour="red")

    [letter] = listed(sub)
    assert requeued(sub).count == 1

    assert (letter.message_id, letter.reason, letter.stage, letter.attempt) == (key, "", "", 1)
    assert letter.enqueued_at == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert letter.died_at is not None
    assert letter.origin == sub.name
    assert letter.properties["attributes"] == {"colour": "red"}
    [again] = sub.begin().take()
    assert again.metadata["attributes"] == {"colour": "red", "broadway_requeued": key}


def test_foreign_message_is_requeued_to_pipeline_topic(sub):
    sub.server.publish(TOPIC, [b"odd"], attributes={f"{GOOGLE}X": ""})
    [letter] = listed(sub)
    assert (letter.died_at, letter.enqueued_at, letter.origin) == (None, None, sub.name)
    assert requeued(sub).count == 1
    assert [message.data for message in sub.begin().take()] == [b"odd"]


def test_refused_requeue_keeps_letter_with_reason(sub):
    # Given letters without room for the mark, one of a deleted subscription, and one to requeue
    dead_letter_by_policy(sub, b"full", **{f"a{number}": "" for number in range(96)})
    sub.server.publish(TOPIC, [b"full"], attributes={f"a{n}": "" for n in range(100)})
    dead_letter_by_policy(sub, b"lost", **{f"{GOOGLE}Subscription": "gone"})

    moved = requeued(sub)

    assert moved.count == 1
    reason = sorted(moved.refused.values())
    assert "it has 100 attributes, the most that Pub/Sub takes" in reason[0]
    assert f"its origin is 'projects/{PROJECT}/subscriptions/gone', which is no source" in reason[1]
    assert sorted(letter.body for letter in listed(sub)) == [b"full", b"lost"]


def test_forged_letter_sets_no_destination_or_id(sub):
    # Given another team's subscription, and letters that a foreign sender publishes
    victim = sub.server.subscription(sub.server.topic("victim"), "victim")
    real = dead_letter_by_policy(sub, b"real", broadway_message_id="m-1")
    for body, claims in (
        (b"evil", {"broadway_subscription": victim}),
        (b"google", {f"{GOOGLE}Subscription": "victim", f"{GOOGLE}SubscriptionProject": PROJECT}),
        (b"twin", {"broadway_message_id": real}),
    ):
        sub.server.publish(TOPIC, [body], attributes=claims)

    # When one is requeued by its id, and then those that name a destination
    with opened(sub) as letters:
        moved = letters.requeue(Choice(ids=frozenset({real})))
        assert (moved.count, moved.unknown, dict(moved.refused)) == (1, (), {})
        assert letters.delete(Choice(ids=frozenset({"m-1"}))).count == 0
        moved = letters.requeue()

    # Then only the pipeline's own topic received any
    assert moved.count == 1
    refusal = f"its origin is {victim!r}, which is no source"
    assert all(refusal in reason for reason in moved.refused.values())
    assert sorted(letter.body for letter in listed(sub)) == [b"evil", b"google"]
    assert sorted(message.data for message in sub.begin().take()) == [b"real", b"twin"]


def test_denied_publish_keeps_dead_letters(sub):
    dead_letter_by_policy(sub, b"one")
    sub.deny("Publish")
    moved = requeued(sub)
    assert moved.count == 0
    [reason] = moved.refused.values()
    assert "allow pubsub.topics.publish" in reason
    assert len(listed(sub)) == 1


# -- their subscription ----------------------------------------------------------------------------


def test_dead_letter_subscription_may_be_named(sub):
    other = sub.server.subscription(TOPIC, "mine")
    dead_letter_by_policy(sub, b"one")
    for options in ({"dead_letter_subscription": "mine"}, {"name": "mine"}, {"name": other}):
        [letter] = listed(sub, **options)
        assert letter.body == b"one"


def test_dead_letter_topic_defaults_to_policy():
    with open_subscription() as sub:
        dead = sub.server.topic("buried")
        sub.server.subscription(dead, "buried")
        policy = {"dead_letter_topic": dead, "max_delivery_attempts": 10}
        sub.name = sub.server.subscription(sub.topic, dead_letter_policy=policy)
        with opened(sub, dead_letter=None) as letters:
            assert letters.place == f"subscription 'projects/{PROJECT}/subscriptions/buried'"


def test_dead_letters_are_read_without_get_permission(sub):
    dead_letter_by_policy(sub, b"one")
    sub.deny("GetSubscription")
    assert [letter.body for letter in listed(sub)] == [b"one"]
    # Its origin cannot be verified, so it stays.
    [reason] = requeued(sub).refused.values()
    assert "allow pubsub.subscriptions.get" in reason


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dead_letter": "none-there"}, "dead letters are read from a pull subscription of their"),
        ({"dead_letter": None}, "there is no topic for dead letters"),
        ({"dead_letter_subscription": "pushed"}, "is a push subscription, from which nothing can"),
        ({"dead_letter_subscription": "detached"}, "is a detached subscription, from which"),
    ],
)
def test_unreadable_dead_letters_are_one_error(sub, options, error):
    sub.server.subscription(TOPIC, "pushed", push_config={"push_endpoint": "https://example.com"})
    sub.server.subscription(TOPIC, "detached")
    detached = f"projects/{PROJECT}/subscriptions/detached"
    sub.server.publisher.detach_subscription(request={"subscription": detached})
    with pytest.raises(ProducerError, match=error), opened(sub, **options):
        pass


def test_source_subscription_holds_no_dead_letters(sub):
    with pytest.raises(ProducerError, match="is what the pipeline drains"), opened(sub, sub.name):
        pass


# -- a run over them -------------------------------------------------------------------------------


def test_dead_letter_run_requeues_and_receives_all(sub):
    for body in (b"one", b"two"):
        dead_letter_by_policy(sub, body)
    run = sub.begin(dead_letter="dead")
    pipeline = Passing.from_rendered(
        {"producer": run.producer}, RunInfo(source=RunSource(kind=DEAD_LETTERS))
    )

    move_letters(pipeline, run.env)

    messages = run.take()
    assert sorted(message.data for message in messages) == [b"one", b"two"]
    assert all(message.redelivered for message in messages)
    assert listed(sub) == []


def test_reads_stay_below_delivery_limit_of_policy(tmp_path):
    with open_subscription() as sub:
        last, dead, limit = sub.server.topic("last"), sub.server.topic("dead"), 5
        policy = {"dead_letter_topic": last, "max_delivery_attempts": limit}
        sub.server.subscription(dead, "dead", dead_letter_policy=policy)
        dead_letter_by_policy(sub, b"body")
        env = ProducerEnv(clock=sub.clock, staging=tmp_path.as_uri())
        counts, error = [], ""
        for _ in range(limit + 2):
            try:
                counts.append(len(listed(sub, env=env)))
            except ProducerError as refused:
                counts.append(0)
                error = str(refused)

        reads = limit - RESERVE
        assert f"max_delivery_attempts is {limit}" in error
        assert counts == [1] * reads + [0] * (limit + 2 - reads)
        with opened(sub, env=env) as letters:
            assert letters.delete().count == 1
