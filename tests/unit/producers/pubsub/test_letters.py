"""Dead letters of Pub/Sub, for people: where they lie, who set them aside, what goes back where."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_broadway.core.custody.dead_letters import Choice, DeadLetter, Moved
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.model.run_source import DEAD_LETTERS, RunSource
from airflow_broadway.producers.kit.looks import RESERVE
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.runs.sources.dead_letters import move_letters
from tests.pubsub_server import PROJECT
from tests.pubsub_stub.errors import Refused
from tests.unit.passing import Passing
from tests.unit.producers.pubsub.kit import Place, place

DEAD = Verdict(Action.DEAD_LETTER, 0.0, "ValueError: why", "process")
#: What Pub/Sub writes on a message that its own policy sets aside.
GOOGLE = "CloudPubSubDeadLetterSource"


@pytest.fixture
def at():
    with place() as made:
        made.server.subscription(made.server.topic("dead"), "dead")
        yield made


def opened(at: Place, name: str | None = None, **options: Any) -> Any:
    producer = PubSubProducer(
        subscription=at.name,
        endpoint=f"http://{at.server.host}",
        receive_timeout=5.0,
        **{"dead_letter": "dead", **options},
    )
    return closing(producer.dead_letters(ProducerEnv(clock=at.clock), place=name))


def listed(at: Place, name: str | None = None, **options: Any) -> list[DeadLetter]:
    with opened(at, name, **options) as letters:
        return list(letters.letters())


def requeued(at: Place) -> Moved:
    with opened(at) as letters:
        moved: Moved = letters.requeue()
        return moved


def google_sets_aside(at: Place, body: bytes, **attributes: str) -> str:
    """Publish what Pub/Sub's own policy makes of a message of the subscription."""
    written = {
        f"{GOOGLE}Subscription": at.name.rpartition("/")[2],
        f"{GOOGLE}SubscriptionProject": PROJECT,
        f"{GOOGLE}DeliveryCount": "10",
        f"{GOOGLE}TopicPublishTime": "2026-01-31T12:00:00.000+00:00",
        **attributes,
    }
    [made] = at.server.publish(f"projects/{PROJECT}/topics/dead", [body], attributes=written)
    return made


def deny(at: Place, call: str) -> None:
    denied = Refused("PERMISSION_DENIED", "User not authorized to perform this action.")
    at.broker.answer = lambda asked, _: denied if asked == call else None


def test_a_message_keeps_attributes_and_key_and_says_that_it_was_a_letter(at):
    # Given a message that died
    at.put("order", attributes={"colour": "red"}, ordering_key="k")
    run = at.begin(dead_letter="dead")
    [first] = run.take()
    assert run.settle([first], {"order": DEAD}).dead_lettered == 1

    # When it is looked at, and sent back
    [letter] = listed(at)
    assert requeued(at) == Moved(1)

    # Then it was shown as it was
    assert (letter.original_id, letter.body) == (first.message_id, b"order")
    assert letter.properties == {"attributes": {"colour": "red"}, "orderingKey": "k"}
    assert (letter.reason, letter.stage, letter.attempt) == ("ValueError: why", "process", 1)
    assert letter.origin == at.name
    # and comes as it was, with the mark
    [again] = at.begin().take()
    assert (again.attempt, again.redelivered) == (1, True)
    assert again.metadata["attributes"] == {
        "colour": "red",
        "broadway_requeued": letter.original_id,
    }
    assert again.metadata["orderingKey"] == "k"
    assert listed(at) == []


def test_what_died_again_bears_no_mark_of_its_first_death(at):
    at.put("order")
    for _ in range(2):
        run = at.begin(dead_letter="dead")
        messages = run.take()
        run.settle(messages, {"order": DEAD})
        [letter] = listed(at)
        assert letter.original_id == messages[0].message_id
        assert letter.properties["attributes"] == {}
        assert requeued(at).count == 1


def test_what_pubsubs_own_policy_set_aside_goes_back_where_it_came_from(at):
    key = google_sets_aside(at, b"late", colour="red")

    [letter] = listed(at)
    assert requeued(at).count == 1

    assert (letter.message_id, letter.reason, letter.stage, letter.attempt) == (key, "", "", 1)
    assert letter.enqueued_at == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert letter.died_at is not None
    assert letter.origin == at.name
    assert letter.properties["attributes"] == {"colour": "red"}
    [again] = at.begin().take()
    assert again.metadata["attributes"] == {"colour": "red", "broadway_requeued": key}


def test_a_message_of_another_program_has_no_instant_and_goes_to_the_pipelines_topic(at):
    at.server.publish(f"projects/{PROJECT}/topics/dead", [b"odd"], attributes={f"{GOOGLE}X": ""})
    [letter] = listed(at)
    assert (letter.died_at, letter.enqueued_at, letter.origin) == (None, None, at.name)
    assert requeued(at).count == 1
    assert [message.data for message in at.begin().take()] == [b"odd"]


def test_what_cannot_go_back_stays_and_says_why(at):
    # Given one without room for the mark, one of a subscription that is gone, and one that can
    google_sets_aside(at, b"full", **{f"a{number}": "" for number in range(96)})
    at.server.publish(
        f"projects/{PROJECT}/topics/dead", [b"full"], attributes={f"a{n}": "" for n in range(100)}
    )
    google_sets_aside(at, b"lost", **{f"{GOOGLE}Subscription": "gone"})

    moved = requeued(at)

    assert moved.count == 1
    why = sorted(moved.refused.values())
    assert "it has 100 attributes, the most that Pub/Sub takes" in why[0]
    assert f"its origin is 'projects/{PROJECT}/subscriptions/gone', which is no source" in why[1]
    assert sorted(letter.body for letter in listed(at)) == [b"full", b"lost"]


def test_a_forged_letter_names_neither_its_destination_nor_another_ones_id(at):
    # Given another team's subscription, and letters that a foreign sender publishes
    victim = at.server.subscription(at.server.topic("victim"), "victim")
    dead = f"projects/{PROJECT}/topics/dead"
    real = google_sets_aside(at, b"real", broadway_message_id="m-1")
    for body, claims in (
        (b"evil", {"broadway_subscription": victim}),
        (b"google", {f"{GOOGLE}Subscription": "victim", f"{GOOGLE}SubscriptionProject": PROJECT}),
        (b"twin", {"broadway_message_id": real}),
    ):
        at.server.publish(dead, [body], attributes=claims)

    # When one is sent back by its id, and then those that name a destination
    with opened(at) as letters:
        moved = letters.requeue(Choice(ids=frozenset({real})))
        assert (moved.count, moved.unknown, dict(moved.refused)) == (1, (), {})
        assert letters.delete(Choice(ids=frozenset({"m-1"}))).count == 0
        moved = letters.requeue()

    # Then the pipeline's own topic alone has got anything
    assert moved.count == 1
    assert all(
        f"its origin is {victim!r}, which is no source" in each for each in moved.refused.values()
    )
    assert sorted(letter.body for letter in listed(at)) == [b"evil", b"google"]
    assert sorted(message.data for message in at.begin().take()) == [b"real", b"twin"]


def test_who_is_refused_publishing_keeps_his_letters(at):
    google_sets_aside(at, b"one")
    deny(at, "Publish")
    moved = requeued(at)
    assert moved.count == 0
    [why] = moved.refused.values()
    assert "allow pubsub.topics.publish" in why
    assert len(listed(at)) == 1


# -- where they lie --------------------------------------------------------------------------------


def test_a_subscription_that_is_called_otherwise_is_named(at):
    other = at.server.subscription(f"projects/{PROJECT}/topics/dead", "mine")
    google_sets_aside(at, b"one")
    for given in ({"dead_letter_subscription": "mine"}, {"name": "mine"}, {"name": other}):
        [letter] = listed(at, **given)
        assert letter.body == b"one"


def test_the_topic_of_the_subscriptions_own_policy_is_looked_at():
    with place() as made:
        dead = made.server.topic("graves")
        made.server.subscription(dead, "graves")
        policy = {"dead_letter_topic": dead, "max_delivery_attempts": 10}
        made.name = made.server.subscription(made.topic, dead_letter_policy=policy)
        with opened(made, dead_letter=None) as letters:
            assert letters.place == f"subscription 'projects/{PROJECT}/subscriptions/graves'"


def test_without_permission_to_look_letters_are_read_all_the_same(at):
    google_sets_aside(at, b"one")
    deny(at, "GetSubscription")
    assert [letter.body for letter in listed(at)] == [b"one"]
    # Where it goes back to nobody may ask: it stays.
    [why] = requeued(at).refused.values()
    assert "allow pubsub.subscriptions.get" in why


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dead_letter": "none-there"}, "dead letters are read from a pull subscription of their"),
        ({"dead_letter": None}, "there is no topic for dead letters"),
        ({"dead_letter_subscription": "pushed"}, "is a push subscription, from which nothing can"),
        ({"dead_letter_subscription": "detached"}, "is a detached subscription, from which"),
    ],
)
def test_where_nothing_can_be_read_one_sentence_says_so(at, given, said):
    topic = f"projects/{PROJECT}/topics/dead"
    at.server.subscription(topic, "pushed", push_config={"push_endpoint": "https://example.com"})
    at.server.subscription(topic, "detached")
    detached = f"projects/{PROJECT}/subscriptions/detached"
    at.server.publisher.detach_subscription(request={"subscription": detached})
    with pytest.raises(ProducerError, match=said), opened(at, **given):
        pass


def test_the_pipelines_own_subscription_is_no_place_for_dead_letters(at):
    with pytest.raises(ProducerError, match="is what the pipeline drains"), opened(at, at.name):
        pass


# -- a run of them ---------------------------------------------------------------------------------


def test_a_run_whose_source_they_are_sends_all_of_them_back_and_receives_them(at):
    for body in (b"one", b"two"):
        google_sets_aside(at, body)
    run = at.begin(dead_letter="dead")
    pipeline = Passing.from_rendered(
        {"producer": run.producer}, RunInfo(source=RunSource(kind=DEAD_LETTERS))
    )

    move_letters(pipeline, run.env)

    found = run.take()
    assert sorted(message.data for message in found) == [b"one", b"two"]
    assert all(message.redelivered for message in found)
    assert listed(at) == []


def test_looks_never_have_a_policy_of_the_subscription_move_the_letters(tmp_path):
    with place() as at:
        last, dead, limit = at.server.topic("last"), at.server.topic("dead"), 5
        policy = {"dead_letter_topic": last, "max_delivery_attempts": limit}
        at.server.subscription(dead, "dead", dead_letter_policy=policy)
        google_sets_aside(at, b"body")
        producer = PubSubProducer(
            subscription=at.name,
            endpoint=f"http://{at.server.host}",
            receive_timeout=5.0,
            dead_letter="dead",
        )
        env = ProducerEnv(clock=at.clock, staging=tmp_path.as_uri())
        seen, said = [], ""
        for _ in range(limit + 2):
            with closing(producer.dead_letters(env)) as letters:
                try:
                    seen.append(len(list(letters.letters())))
                except ProducerError as error:
                    seen.append(0)
                    said = str(error)

        looks = limit - RESERVE
        assert f"max_delivery_attempts is {limit}" in said
        assert seen == [1] * looks + [0] * (limit + 2 - looks)
        with closing(producer.dead_letters(env)) as letters:
            assert letters.delete().count == 1
