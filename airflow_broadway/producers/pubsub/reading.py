"""The messages that are made of what Pub/Sub hands out."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message

__all__ = ["message_of", "metadata_of"]


def message_of(
    raw: Any, generation: str, *, attempt: int, redelivered: bool, at: datetime, position: int
) -> Message:
    """The message.

    :param raw: A ``ReceivedMessage``, as protobuf has it.
    """
    message = raw.message
    body = message.data
    delivery = Delivery(payload=body, properties=_properties_of(message))
    return Message(
        body,
        metadata=metadata_of(raw),
        acknowledger=AckRef(None, generation, delivery),
        message_id=message.message_id,
        attempt=attempt,
        redelivered=redelivered,
        received_at=at,
        position=position,
        size=len(body),
    )


def metadata_of(raw: Any) -> dict[str, Any]:
    """Broadway's metadata, under its names.

    ``deliveryAttempt`` is ``None`` without a dead-letter policy; ``publishTime`` is ISO 8601 text,
    for metadata is JSON.
    """
    message = raw.message
    attributes = message.attributes
    return {
        "attributes": dict(attributes) if attributes else {},
        "deliveryAttempt": raw.delivery_attempt or None,
        "messageId": message.message_id,
        "orderingKey": message.ordering_key,
        "publishTime": _instant(message.publish_time),
    }


def _instant(stamp: Any) -> str | None:
    """An instant as protobuf has it, as text; its own conversion takes many times as long."""
    seconds, nanos = stamp.seconds, stamp.nanos
    if not seconds and not nanos:
        return None
    return f"{_second(seconds)}.{nanos // 1000:06d}+00:00"


@lru_cache(maxsize=64)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


def _properties_of(message: Any) -> str:
    """What a dead letter of the message keeps, as JSON: attributes and ordering key."""
    kept: dict[str, Any] = {}
    if message.attributes:
        kept["attributes"] = dict(message.attributes)
    if message.ordering_key:
        kept["ordering_key"] = message.ordering_key
    return json.dumps(kept, separators=(",", ":")) if kept else "{}"
