"""Dead letters: the body as it came, and why, in attributes that fit Pub/Sub's limits.

``broadway_reason``, ``broadway_stage``, ``broadway_attempt``, ``broadway_message_id`` and
``broadway_subscription`` stand beside the message's own attributes.  A message may have 100, and
10 MB in all: what does not fit is left out, the least of ours first, and never the message's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.text import cut
from airflow_broadway.producers.kit.receipts.batch_requests import Keyed
from airflow_broadway.producers.pubsub.limits import (
    MAX_ATTRIBUTES,
    MAX_MESSAGE,
    MAX_PUBLISH,
    MAX_VALUE,
)

__all__ = ["letter", "requests", "size_of"]

#: What a letter says of itself, the most useful first; those of an earlier one, come back by a
#: redrive, give way to it.
_OURS: Final = (
    "broadway_reason",
    "broadway_message_id",
    "broadway_attempt",
    "broadway_stage",
    "broadway_subscription",
)
#: Bytes that a request has beside its messages, and a message and an attribute beside theirs.
_BESIDE, _EACH = 1024, 16


def letter(entry: Entry, subscription: str) -> dict[str, Any]:
    """The message to publish for one dead letter.

    :param entry: With payload and properties as received.
    :param subscription: Its full name.
    """
    properties: dict[str, Any] = json.loads(entry.properties or "{}")
    own = {
        name: value for name, value in properties.get("attributes", {}).items() if name not in _OURS
    }
    made: dict[str, Any] = {"data": entry.payload or b"", "attributes": own}
    if properties.get("ordering_key"):
        made["ordering_key"] = properties["ordering_key"]
    room = MAX_MESSAGE - _BESIDE - size_of(made)
    for name, value in _why(entry, subscription).items():
        size = len(name) + len(value.encode()) + _EACH
        if value and len(own) < MAX_ATTRIBUTES and size <= room:
            own[name] = value
            room -= size
    if not made["data"] and not own:
        own["broadway_attempt"] = str(entry.attempt)  # Pub/Sub takes no message of nothing
    return made


def _why(entry: Entry, subscription: str) -> dict[str, str]:
    values = (
        cut(entry.verdict.reason, MAX_VALUE),
        entry.message_id,
        str(entry.attempt),
        entry.verdict.stage,
        cut(subscription, MAX_VALUE),
    )
    return dict(zip(_OURS, values, strict=True))


def size_of(message: Mapping[str, Any]) -> int:
    """Bytes of a message in a request, at the most."""
    attributes = message["attributes"]
    texts = sum(
        len(key.encode()) + len(value.encode()) + _EACH for key, value in attributes.items()
    )
    return len(message["data"]) + texts + len(message.get("ordering_key", "").encode()) + _EACH


def requests(letters: Mapping[str, dict[str, Any]]) -> list[list[Keyed]]:
    """Letters in requests of at most a thousand messages, and of 10 MB."""
    made: list[list[Keyed]] = []
    room = 0
    for key, message in letters.items():
        size = size_of(message)
        if not made or len(made[-1]) == MAX_PUBLISH or size > room:
            made.append([])
            room = MAX_MESSAGE - _BESIDE
        made[-1].append((key, message))
        room -= size
    return made
