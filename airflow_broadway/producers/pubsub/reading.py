"""The messages that are made of what Pub/Sub hands out."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any, Final

from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message

__all__ = ["instant_of", "message_of"]

_NO_PROPERTIES: Final = "{}"


def message_of(
    raw: Any, generation: str, *, attempt: int, redelivered: bool, at: datetime, position: int
) -> Message:
    """The message, with Broadway's metadata under its names.

    ``deliveryAttempt`` is ``None`` without a dead-letter policy; ``publishTime`` is ISO 8601 text,
    for metadata is JSON.

    :param raw: A ``ReceivedMessage``, as protobuf has it.
    """
    message = raw.message
    body, message_id, key = message.data, message.message_id, message.ordering_key
    attributes = dict(found) if (found := message.attributes) else {}
    properties = _properties(attributes, key) if attributes or key else _NO_PROPERTIES
    delivery = Delivery(payload=body, properties=properties)
    return Message(
        body,
        metadata={
            "attributes": attributes,
            "deliveryAttempt": raw.delivery_attempt or None,
            "messageId": message_id,
            "orderingKey": key,
            "publishTime": _instant(message.publish_time),
        },
        acknowledger=AckRef(None, generation, delivery),
        message_id=message_id,
        attempt=attempt,
        redelivered=redelivered,
        received_at=at,
        position=position,
        size=len(body),
    )


def instant_of(stamp: Any) -> datetime | None:
    """An instant as protobuf has it; ``None``: it says none."""
    text = _instant(stamp)
    return None if text is None else datetime.fromisoformat(text)


def _instant(stamp: Any) -> str | None:
    """An instant as protobuf has it, as text; its own conversion takes many times as long."""
    seconds, nanos = stamp.seconds, stamp.nanos
    if not seconds and not nanos:
        return None
    return f"{_second(seconds)}.{nanos // 1000:06d}+00:00"


@lru_cache(maxsize=64)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


def _properties(attributes: dict[str, str], key: str) -> str:
    """What a dead letter of the message keeps, as JSON: attributes and ordering key."""
    kept: dict[str, Any] = {}
    if attributes:
        kept["attributes"] = attributes
    if key:
        kept["ordering_key"] = key
    return json.dumps(kept, separators=(",", ":"))
