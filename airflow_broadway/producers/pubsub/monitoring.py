"""How full a subscription is: Cloud Monitoring alone tells, some minutes late."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

__all__ = ["Backlog", "backlog_of"]

_UNDELIVERED: Final = "num_undelivered_messages"
_OLDEST: Final = "oldest_unacked_message_age"
#: Values are a minute apart, and come up to three minutes late.
_LOOK_BACK: Final = timedelta(minutes=10)


class Backlog(NamedTuple):
    """What Cloud Monitoring says of a subscription.

    :param messages: Those not acknowledged, whoever holds them.
    :param oldest_age: Seconds since the oldest of them was published.
    """

    messages: int
    oldest_age: float


def backlog_of(client: Any, subscription: str, now: datetime, timeout: float) -> Backlog | None:
    """The newest values; ``None`` if one of them is not there.

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
    """The newest value of what is one series."""
    points = [point for each in series for point in each.points]
    if not points:
        return None
    newest = max(points, key=lambda point: point.interval.end_time)
    return int(newest.value.int64_value)
