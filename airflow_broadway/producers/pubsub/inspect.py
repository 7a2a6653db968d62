"""Reports the depth of a subscription: Cloud Monitoring alone knows it, some minutes late."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.producers.engine.port import Broker
from airflow_broadway.producers.engine.receipts import HeldBy, ReceiptsFolder
from airflow_broadway.producers.pubsub.client import Client, open_metrics
from airflow_broadway.producers.pubsub.errors import translated

if TYPE_CHECKING:
    from airflow_broadway.producers.pubsub.options import PubSubProducer

log = logging.getLogger(__name__)

_UNDELIVERED: Final = "num_undelivered_messages"
_OLDEST: Final = "oldest_unacked_message_age"
#: Values are a minute apart, and come up to three minutes late.
_LOOK_BACK: Final = timedelta(minutes=10)


class Backlog(NamedTuple):
    """The figures of Cloud Monitoring for a subscription.

    :param messages: Those not acknowledged, held or not.
    :param oldest_age: Seconds since the oldest of them was published.
    """

    messages: int
    oldest_age: float


def backlog_of(client: Any, subscription: str, now: datetime, timeout: float) -> Backlog | None:
    """Returns the newest values; ``None`` if one of them is missing.

    :param client: A ``MetricServiceClient``.
    :param subscription: Its full name.
    """
    _, project, _, name = subscription.split("/")
    interval = {"start_time": now - _LOOK_BACK, "end_time": now}
    found = {
        metric: _newest(
            client.list_time_series(
                request={
                    "name": f"projects/{project}",
                    "filter": f'metric.type = "pubsub.googleapis.com/subscription/{metric}"'
                    f' AND resource.labels.subscription_id = "{name}"',
                    "interval": interval,
                },
                retry=None,
                timeout=timeout,
            )
        )
        for metric in (_UNDELIVERED, _OLDEST)
    }
    messages, oldest = found[_UNDELIVERED], found[_OLDEST]
    return None if messages is None or oldest is None else Backlog(messages, float(oldest))


def _newest(series: Iterable[Any]) -> int | None:
    """Returns the newest value of one series."""
    points = [point for each in series for point in each.points]
    if not points:
        return None
    newest = max(points, key=lambda point: point.interval.end_time)
    return int(newest.value.int64_value)


<<<<<<< HEAD
def depth(producer: PubSubOptions, broker: Broker[Client]) -> QueueDepth | None:
=======
class Look(NamedTuple):
    """A subscription as it is.

    :param settings: For people.
    :param depth: ``None``: not known.
    """

    settings: dict[str, str]
    findings: list[Finding]
    depth: QueueDepth | None
    held: list[HeldBy]


def look(producer: PubSubProducer, broker: Broker[Client]) -> Look:
    """Reads the subscription as it is; changes nothing.

    :raises ProducerError: If that is denied.
    """
    client = broker.client
    settings = client.settings()
    return Look(
        settings=_shown(settings),
        findings=findings_of(producer, client, settings),
        depth=depth(producer, broker),
        held=ReceiptsFolder(broker).held_by_others(broker.env.generation),
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


def seek(
    producer: PubSubProducer,
    broker: Broker[Client],
    *,
    time: datetime | None = None,
    snapshot: str | None = None,
) -> str:
    """Seeks the subscription to a time or a snapshot; returns its name.

    Ack ids from before are void then: messages that runs hold would come again while they are at
    work.

    :raises ProducerError: If a run holds messages, or there is no such snapshot.
    """
    live = _live(producer, broker)
    if live:
        raise ProducerError(
            f"runs hold {many(sum(each.messages for each in live), 'message')} of"
            f" {producer.subscription!r} until {live[-1].until.isoformat(timespec='seconds')}: a"
            " seek would hand them out once more while they are at work; stop the pipeline, and let"
            " them end first"
        )
    client = broker.client
    if snapshot is not None and "/" not in snapshot:
        snapshot = f"projects/{client.project}/snapshots/{snapshot}"
    client.seek({"time": time} if snapshot is None else {"snapshot": snapshot})
    return client.name


def depth(producer: PubSubProducer, broker: Broker[Client]) -> QueueDepth | None:
>>>>>>> 4ec7ce5 (A producer on the engine names its adapter; options and producer are one module; order of groups by the base)
    """Returns how full the subscription is, by Cloud Monitoring; ``None``: that is not known.

    Messages that wait for a retry's delay count as ready.  Those that runs hold are known from
    their receipts.  Dead letters are messages of another topic, and are not counted.
    """
    backlog = _backlog(producer, broker)
    if backlog is None:
        return None
    leased = sum(held.messages for held in _live(producer, broker))
    ready = max(0, backlog.messages - leased)
    oldest = backlog.oldest_age if ready else None
    return QueueDepth(ready=ready, delayed=0, leased=leased, dead=0, oldest_age=oldest)


def _live(producer: PubSubProducer, broker: Broker[Client]) -> list[HeldBy]:
    now = broker.clock.now()
    held = ReceiptsFolder(broker).held_by_others(broker.env.generation)
    return [generation for generation in held if generation.until > now]


def _backlog(producer: PubSubProducer, broker: Broker[Client]) -> Backlog | None:
    """Reads Cloud Monitoring; ``None`` where that is not possible."""
    client = broker.client
    metrics = open_metrics(producer, broker.env)
    if metrics is None:
        return None
    try:
        backlog = backlog_of(metrics, client.name, broker.clock.now(), client.timeout)
        if backlog is None:
            log.info(
                "The depth of %r is not known: Cloud Monitoring has no new value.", client.name
            )
        return backlog
    except Exception as error:
        why = translated(error, "ListTimeSeries", client.name, "monitoring.googleapis.com")
        log.info("The depth of %r is not known: %s", client.name, why)
        return None
    finally:
        metrics.transport.close()
