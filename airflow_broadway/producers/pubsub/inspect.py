"""What a subscription says of itself: its kind, its policies, its depth."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_broadway.core.custody.protocol import Delivery, QueueDepth
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import many
from airflow_broadway.producers.pubsub.client import Client, open_client, open_metrics
from airflow_broadway.producers.pubsub.errors import Denied, Missing, translated
from airflow_broadway.producers.pubsub.monitoring import Backlog, backlog_of
from airflow_broadway.producers.pubsub.receipts import receipts_folder

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.pubsub.options import PubSubOptions

__all__ = [
    "HeldBy",
    "Look",
    "check",
    "dead_letter_topic",
    "depth",
    "letters_subscription",
    "look",
    "seek",
    "topic_of",
]

log = logging.getLogger(__name__)

#: A release counts as a delivery: below this, dead runs alone soon make dead letters.
FEWEST_DELIVERIES: Final = 10
#: What stands for a topic that was deleted.
_DELETED: Final = "_deleted-topic_"
_NO_DEAD_LETTER: Final = (
    "there is no topic for dead letters: give the producer dead_letter=…, or the subscription {!r}"
    " a dead-letter policy; until then such messages come back"
)


def check(producer: PubSubOptions, client: Client) -> int:
    """Look at the subscription before anything is pulled, and say what will go wrong.

    :returns: Its own ack deadline, in seconds; 0 if that may not be asked for.
    :raises ProducerError: If it cannot be pulled, or dead letters would have nowhere to go.
    """
    try:
        settings = client.settings()
    except Denied:
        log.info(
            "pubsub.subscriptions.get is not allowed on %r: its kind and its policies cannot be"
            " checked, and what is pulled is held anew each time.",
            client.name,
        )
        return 0
    refusal = refusal_of(producer, settings)
    if refusal is not None:
        raise ProducerError(refusal)
    _check_letters(producer, client)
    for trouble in troubles_of(producer, settings):
        log.warning("%s", trouble)
    return int(settings.ack_deadline_seconds)


def _check_letters(producer: PubSubOptions, client: Client) -> None:
    """Refuse a topic for dead letters that is not there."""
    if producer.dead_letter is None or not producer.may_publish(Delivery()):
        return
    with suppress(Denied):  # who may publish may not look, with the least roles
        client.has_topic(client.topic(producer.dead_letter))


def refusal_of(producer: PubSubOptions, settings: Any) -> str | None:
    """Why no run can pull from the subscription, or settle what it pulls; ``None``: it can."""
    name = settings.name
    if settings.detached:
        return (
            f"the subscription {name!r} is detached from its topic, and holds nothing any more:"
            " create another one"
        )
    kind = _kind_of(settings)
    if kind is not None:
        return (
            f"{name!r} is a {kind} subscription: Pub/Sub delivers its messages itself, and none can"
            " be pulled; create a pull subscription beside it"
        )
    if settings.enable_message_ordering and not producer.message_ordering:
        return (
            f"the subscription {name!r} delivers in order (enable_message_ordering), where one that"
            " comes again brings those behind it again: give the producer message_ordering=True"
        )
    if producer.message_ordering and not settings.enable_message_ordering:
        return (
            f"message_ordering=True needs a subscription that delivers in order, and {name!r} does"
            " not: create one with enable_message_ordering, which cannot be changed later"
        )
    has_policy = bool(settings.dead_letter_policy.dead_letter_topic)
    if not has_policy and producer.dead_letter is None and producer.may_publish(Delivery()):
        return _NO_DEAD_LETTER.format(name)
    return None


def _kind_of(settings: Any) -> str | None:
    """What other than a pull subscription it is."""
    if settings.push_config.push_endpoint:
        return "push"
    if settings.bigquery_config.table:
        return "BigQuery"
    if settings.cloud_storage_config.bucket:
        return "Cloud Storage"
    # Older clients do not know it.
    if getattr(settings, "bigtable_config", None) and settings.bigtable_config.table:
        return "Bigtable"
    return None


def troubles_of(producer: PubSubOptions, settings: Any) -> list[str]:
    """What is wrong with the subscription though runs can pull from it."""
    found = []
    name = settings.name
    if settings.topic == _DELETED:
        found.append(
            f"the topic of the subscription {name!r} was deleted: what is left is drained, and"
            " nothing new comes"
        )
    most = int(settings.dead_letter_policy.max_delivery_attempts)
    retries = "retry" in (producer.on_success, producer.on_failure)
    attempts = producer.retry.max_attempts if retries else 0
    if most and most < max(FEWEST_DELIVERIES, attempts):
        early = f", before its {many(attempts, 'attempt')} are used up" if most < attempts else ""
        found.append(
            f"the dead-letter policy of {name!r} makes a message a dead letter after"
            f" {many(most, 'delivery', 'deliveries')}{early}: here what a dead or stopped run gives"
            f" back counts as one too; set max_delivery_attempts to"
            f" {max(FEWEST_DELIVERIES, attempts)} or more"
        )
    least = settings.retry_policy.minimum_backoff
    if retries and least and least.total_seconds() > producer.retry.backoff:
        found.append(
            f"the retry policy of {name!r} puts off what comes again by {least.total_seconds():g} s"
            f" at least, beyond the delays of the producer's retry (backoff"
            f" {producer.retry.backoff:g} s)"
        )
    return found


def dead_letter_topic(producer: PubSubOptions, client: Client) -> str:
    """Where dead letters go: the option's topic, else that of the dead-letter policy.

    :raises ProducerError: If there is none, or it may not be asked for.
    """
    if producer.dead_letter is not None:
        return client.topic(producer.dead_letter)
    topic = client.settings().dead_letter_policy.dead_letter_topic
    if not topic:
        raise ProducerError(_NO_DEAD_LETTER.format(client.name))
    return str(topic)


def letters_subscription(producer: PubSubOptions, client: Client, place: str | None) -> Client:
    """The subscription that shows dead letters: ``place``, else that of the option, else the one
    that is called as their topic.

    :raises ProducerError: If there is none, or it cannot be the one.
    """
    named = place or producer.dead_letter_subscription
    if named is None:
        named = dead_letter_topic(producer, client).replace("/topics/", "/subscriptions/")
    found = client.other(named)
    if found.name == client.name:
        raise ProducerError(
            f"{client.name!r} is what the pipeline drains: dead letters need a subscription of"
            " their own, on their topic"
        )
    try:
        settings = found.settings()
    except Denied:  # who may pull may not look, with the least roles
        return found
    except Missing as error:
        raise ProducerError(
            f"{error}; dead letters are read from a pull subscription of their topic: make one of"
            " this id, or name yours by dead_letter_subscription or --place"
        ) from error
    kind = "detached" if settings.detached else _kind_of(settings)
    if kind is not None:
        raise ProducerError(
            f"{found.name!r} is a {kind} subscription, from which nothing can be pulled: dead"
            " letters need a pull subscription of their topic"
        )
    return found


def topic_of(client: Client) -> str:
    """The topic of a subscription.

    :raises ProducerError: If it was deleted, or may not be asked for.
    """
    topic = str(client.settings().topic)
    if topic == _DELETED:
        raise ProducerError(f"the topic of the subscription {client.name!r} was deleted")
    return topic


class HeldBy(NamedTuple):
    """Messages that a generation holds.

    :param folder: The name of its folder among the subscription's notes.
    """

    folder: str
    messages: int
    until: datetime


class Look(NamedTuple):
    """What a subscription says of itself, and what is known of it.

    :param settings: For people.
    :param refusal: Why no run can begin; ``None``: one can.
    :param troubles: What a run would warn of.
    :param depth: ``None``: not known.
    """

    settings: dict[str, str]
    refusal: str | None
    troubles: list[str]
    depth: QueueDepth | None
    held: list[HeldBy]


def look(producer: PubSubOptions, env: ProducerEnv) -> Look:
    """The subscription as it is; nothing is changed.

    :raises ProducerError: If it may not be looked at.
    """
    with _opened(producer, env) as client:
        settings = client.settings()
        refusal = refusal_of(producer, settings)
        if refusal is None:
            try:
                _check_letters(producer, client)
            except Missing as error:
                refusal = str(error)
        return Look(
            settings=_shown(settings),
            refusal=refusal,
            troubles=troubles_of(producer, settings),
            depth=_depth(producer, env, client),
            held=_held(producer, env),
        )


def _shown(settings: Any) -> dict[str, str]:
    policy, backoff = settings.dead_letter_policy, settings.retry_policy
    letters = "none"
    if policy.dead_letter_topic:
        most = many(policy.max_delivery_attempts, "delivery", "deliveries")
        letters = f"{policy.dead_letter_topic}, after {most}"
    least = backoff.minimum_backoff
    return {
        "subscription": settings.name,
        "topic": settings.topic,
        "ack deadline": f"{settings.ack_deadline_seconds} s",
        "exactly once": "yes" if settings.enable_exactly_once_delivery else "no",
        "in order": "yes" if settings.enable_message_ordering else "no",
        "dead letters": letters,
        "retry policy": f"{least.total_seconds():g} s at least" if least else "at once",
    }


def _held(producer: PubSubOptions, env: ProducerEnv) -> list[HeldBy]:
    """What generations hold that nobody has settled, the longest held last."""
    folder = receipts_folder(producer, env)
    found = []
    for each in folder.open_ones(env.generation):
        receipts = folder.in_folder(each)
        if receipts.until is not None and receipts.held():
            until = datetime.fromtimestamp(receipts.until, timezone.utc)
            found.append(HeldBy(each, len(receipts.held()), until))
    return sorted(found, key=lambda held: held.until)


def seek(
    producer: PubSubOptions,
    env: ProducerEnv,
    *,
    time: datetime | None = None,
    snapshot: str | None = None,
) -> str:
    """Set the subscription to a time or a snapshot; its name.

    Ack ids from before are void then: what runs hold would come again while they are at work.

    :raises ProducerError: If a run holds messages, or there is no such snapshot.
    """
    now = env.clock.now()
    live = [each for each in _held(producer, env) if each.until > now]
    if live:
        raise ProducerError(
            f"runs hold {many(sum(each.messages for each in live), 'message')} of"
            f" {producer.subscription!r} until {live[-1].until.isoformat(timespec='seconds')}: a"
            " seek would hand them out once more while they are at work; stop the pipeline, and let"
            " them end first"
        )
    with _opened(producer, env) as client:
        if snapshot is not None and "/" not in snapshot:
            snapshot = f"projects/{client.project}/snapshots/{snapshot}"
        client.seek({"time": time} if snapshot is None else {"snapshot": snapshot})
        return client.name


def depth(producer: PubSubOptions, env: ProducerEnv) -> QueueDepth | None:
    """How full the subscription is, by Cloud Monitoring; ``None``: that is not known.

    What waits for a retry's delay counts as ready.  What runs hold is known from their receipts.
    Dead letters are messages of another topic, and are not counted.
    """
    with _opened(producer, env) as client:
        return _depth(producer, env, client)


def _depth(producer: PubSubOptions, env: ProducerEnv, client: Client) -> QueueDepth | None:
    found = _backlog(producer, env, client)
    if found is None:
        return None
    now = env.clock.now()
    leased = sum(each.messages for each in _held(producer, env) if each.until > now)
    ready = max(0, found.messages - leased)
    oldest = found.oldest_age if ready else None
    return QueueDepth(ready=ready, delayed=0, leased=leased, dead=0, oldest_age=oldest)


@contextmanager
def _opened(producer: PubSubOptions, env: ProducerEnv) -> Iterator[Client]:
    client = open_client(producer, env)
    try:
        yield client
    finally:
        client.close()


def _backlog(producer: PubSubOptions, env: ProducerEnv, client: Client) -> Backlog | None:
    """What Cloud Monitoring says; ``None`` where it cannot be asked."""
    metrics = open_metrics(producer, env)
    if metrics is None:
        return None
    try:
        found = backlog_of(metrics, client.name, env.clock.now(), client.timeout)
        if found is None:
            log.info(
                "The depth of %r is not known: Cloud Monitoring has no new value.", client.name
            )
        return found
    except Exception as error:
        said = translated(error, "ListTimeSeries", client.name, "monitoring.googleapis.com")
        log.info("The depth of %r is not known: %s", client.name, said)
        return None
    finally:
        metrics.transport.close()
