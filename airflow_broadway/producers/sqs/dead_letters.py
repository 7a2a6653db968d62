"""Dead letters: the body as it came, and why, in message attributes that fit SQS's limits.

``broadway_reason``, ``broadway_stage``, ``broadway_attempt``, ``broadway_message_id`` and
``broadway_queue`` stand beside the message's own attributes.  A message may have ten: where there
is no room for five, ``broadway`` has all of them as JSON; a tenth attribute of the message's own
then moves into ``broadway`` too.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.producers.sqs.limits import (
    MAX_ATTRIBUTES,
    MAX_BATCH,
    MAX_BODY,
    MAX_BODY_FORMERLY,
    unsendable,
)

__all__ = ["letter", "requests", "size_of"]

#: What a letter says of itself; those of an earlier one, come back by a redrive, give way to it.
_OURS: Final = frozenset(
    f"broadway_{name}" for name in ("message_id", "queue", "attempt", "stage", "reason")
)
#: Bytes of the reason where the message has no room for more.
_SHORT: Final = 64


def letter(entry: Entry, queue: str, *, fifo: bool, max_bytes: int = MAX_BODY) -> dict[str, Any]:
    """The entry of ``SendMessageBatch`` for one dead letter, without its ``Id``.

    :param entry: With payload and properties as received.
    :param queue: The name of the queue it comes from.
    :param fifo: Whether the dead-letter queue is a FIFO queue.
    :param max_bytes: What the dead-letter queue takes.
    """
    properties: dict[str, Any] = json.loads(entry.properties or "{}")
    own = {
        name: _attribute(value)
        for name, value in properties.get("attributes", {}).items()
        if name not in _OURS
    }
    made: dict[str, Any] = {"MessageBody": (entry.payload or b"").decode("utf-8", "surrogatepass")}
    for limit in (MAX_REASON, _SHORT, 0):
        made["MessageAttributes"] = _attributes(entry, queue, own, limit)
        if size_of(made) <= max_bytes:
            break
    else:  # as large as a message may be: it goes as it came
        made["MessageAttributes"] = own
    if not made["MessageAttributes"]:
        del made["MessageAttributes"]
    if properties.get("AWSTraceHeader"):  # not counted in its size or its attributes
        header = {"DataType": "String", "StringValue": properties["AWSTraceHeader"]}
        made["MessageSystemAttributes"] = {"AWSTraceHeader": header}
    if fifo:
        made["MessageGroupId"] = properties.get("MessageGroupId") or "broadway"
        # Sent again after a crash within five minutes, it is there once.
        made["MessageDeduplicationId"] = entry.message_id
    return made


def _attributes(
    entry: Entry, queue: str, own: Mapping[str, Any], limit: int
) -> dict[str, dict[str, Any]]:
    reason = _sendable(entry.verdict.reason, limit)
    why = {
        "broadway_message_id": entry.message_id,
        "broadway_queue": queue,
        "broadway_attempt": str(entry.attempt),
        "broadway_stage": entry.verdict.stage,
        "broadway_reason": reason,
    }
    why = {name: value for name, value in why.items() if value}
    if len(own) + len(why) <= MAX_ATTRIBUTES:
        made = {**own, **{name: _string(value) for name, value in why.items()}}
        made["broadway_attempt"] = {"DataType": "Number", "StringValue": str(entry.attempt)}
        return made
    kept = dict(list(own.items())[: MAX_ATTRIBUTES - 1])
    packed: dict[str, Any] = {name.removeprefix("broadway_"): value for name, value in why.items()}
    moved = {name: _plain(value) for name, value in own.items() if name not in kept}
    if moved:
        packed["attributes"] = moved
    return {**kept, "broadway": _string(json.dumps(packed, ensure_ascii=False))}


def _string(value: str) -> dict[str, Any]:
    return {"DataType": "String", "StringValue": value}


def _attribute(value: Mapping[str, Any]) -> dict[str, Any]:
    if "binary_value" in value:
        raw = base64.b64decode(value["binary_value"])
        return {"DataType": value["data_type"], "BinaryValue": raw}
    return {"DataType": value["data_type"], "StringValue": value["string_value"]}


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    if "BinaryValue" in value:
        encoded = base64.b64encode(value["BinaryValue"]).decode("ascii")
        return {"data_type": value["DataType"], "binary_value": encoded}
    return {"data_type": value["DataType"], "string_value": value["StringValue"]}


def _sendable(text: str, limit: int) -> str:
    """``text`` in at most ``limit`` bytes, and without characters that SQS refuses."""
    if unsendable(text):
        text = "".join("�" if unsendable(each) else each for each in text)
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def size_of(entry: Mapping[str, Any]) -> int:
    """What SQS counts of an entry: body, and name, type and value of each attribute."""
    total = len(entry["MessageBody"].encode("utf-8", "surrogatepass"))
    for name, value in entry.get("MessageAttributes", {}).items():
        total += len(name.encode()) + len(value["DataType"].encode())
        content = value.get("BinaryValue")
        total += len(content if content is not None else value["StringValue"].encode("utf-8"))
    return total


def requests(
    entries: Mapping[str, dict[str, Any]],
) -> list[list[tuple[str, dict[str, Any]]]]:
    """Entries in requests of at most ten, and of 256 KiB unless one entry alone is larger."""
    made: list[list[tuple[str, dict[str, Any]]]] = []
    room = 0
    for key, entry in entries.items():
        size = size_of(entry)
        if not made or len(made[-1]) == MAX_BATCH or size > room:
            made.append([])
            room = MAX_BODY_FORMERLY
        made[-1].append((key, entry))
        room -= size
    return made
