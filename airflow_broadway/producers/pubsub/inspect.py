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
    from airflow_broadway.producers.pubsub.options import PubSubOptions

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


def depth(producer: PubSubOptions, broker: Broker[Client]) -> QueueDepth | None:
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


def _live(producer: PubSubOptions, broker: Broker[Client]) -> list[HeldBy]:
    now = broker.clock.now()
    held = ReceiptsFolder(producer.kind, broker).held_by_others(broker.env.generation)
    return [generation for generation in held if generation.until > now]


def _backlog(producer: PubSubOptions, broker: Broker[Client]) -> Backlog | None:
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
