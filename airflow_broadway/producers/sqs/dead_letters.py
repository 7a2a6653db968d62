"""Reads SQS messages, and serves dead letters: the body as it came, and the reason in message
attributes that fit SQS's limits.

``broadway_reason``, ``broadway_stage``, ``broadway_attempt``, ``broadway_message_id`` and
``broadway_queue`` stand beside the message's own attributes.  A message may have ten: where there
is no room for five, ``broadway`` has all of them as JSON; a tenth attribute of the message's own
then moves into ``broadway`` too.

A letter that is sent back becomes a new message to SQS.  So it has ``broadway_requeued``, the id
that it had, and is received as redelivered; where ten attributes leave no room that is in
``broadway``, too.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Final

from airflow_broadway.core.custody.dead_letters import DeadLetter
from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.producers.engine.letters import EngineDeadLetters, attempt_of
from airflow_broadway.producers.engine.port import Denied, Publisher, Received
from airflow_broadway.producers.sqs import limits
from airflow_broadway.producers.sqs.client import Queue, count_of, redrive_of

#: What a letter says of itself; those of an earlier one, come back by a redrive, give way to it.
_OURS: Final = frozenset(
    f"broadway_{name}" for name in ("message_id", "queue", "attempt", "stage", "reason", "requeued")
)
#: Where it is stated if there is no room.
_PACKED: Final = "broadway"
#: What boto3 takes of an attribute.
_ATTRIBUTE: Final = ("DataType", "StringValue", "BinaryValue")
#: Seconds that a receive of dead letters waits, for SQS to query all of its servers.  An empty
#: answer is the end.
_WAIT_SECONDS = 1
#: Bytes of the reason where the message has no room for more.
_SHORT: Final = 64


# -- a message, read -------------------------------------------------------------------------------


def system_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns SQS's own attributes of a message."""
    value = raw.get("Attributes")
    return value if isinstance(value, Mapping) else {}


def receives_of(raw: Mapping[str, Any]) -> int:
    """Returns the receive count of a message, this receive included."""
    count = number_of(system_of(raw).get("ApproximateReceiveCount", 1))
    return count if isinstance(count, int) and count > 0 else 1


def group_of(raw: Mapping[str, Any]) -> str:
    """Returns the message group; ``""`` if it has none."""
    return str(system_of(raw).get("MessageGroupId") or "")


def number_of(value: Any) -> Any:
    """Reads a number that SQS gives as text; other text stays as it came."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return as_text(value)


def as_text(value: Any) -> str:
    """Reads a value that SQS gives as text; another server may give something else."""
    return value if isinstance(value, str) else "" if value is None else str(value)


def value_of(attribute: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message attribute as JSON."""
    kind = as_text(attribute.get("DataType", "String"))
    if "BinaryValue" in attribute:
        return {"data_type": kind, "binary_value": _text(attribute["BinaryValue"])}
    return {"data_type": kind, "string_value": as_text(attribute.get("StringValue"))}


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def properties_of(raw: Mapping[str, Any]) -> str:
    """Returns the properties that a dead letter of the message keeps, as JSON text."""
    kept = properties_as_json(raw)
    return json.dumps(kept, separators=(",", ":")) if kept else "{}"


def properties_as_json(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties that a dead letter keeps: attributes, group, deduplication id."""
    system = system_of(raw)
    kept: dict[str, Any] = {}
    if raw.get("MessageAttributes"):
        kept["attributes"] = {
            name: value_of(attribute) for name, attribute in raw["MessageAttributes"].items()
        }
    for name in ("MessageGroupId", "MessageDeduplicationId", "AWSTraceHeader"):
        if system.get(name):
            kept[name] = as_text(system[name])
    return kept


# -- a dead letter, made ---------------------------------------------------------------------------


def letter(
    entry: Entry, queue: str, *, fifo: bool, max_bytes: int = limits.MAX_BODY
) -> dict[str, Any]:
    """Makes the entry of ``SendMessageBatch`` for one dead letter, without its ``Id``.

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
    # Sent again after a crash within five minutes, it is there once.
    return _addressed(made, properties, entry.message_id if fifo else None)


def _addressed(
    made: dict[str, Any], system: Mapping[str, Any], fifo_id: str | None
) -> dict[str, Any]:
    """Adds to an entry what is not among its attributes: the trace header, and its group.

    :param fifo_id: The deduplication id, for a FIFO queue.
    """
    if system.get("AWSTraceHeader"):  # not counted in its size or its attributes
        header = {"DataType": "String", "StringValue": system["AWSTraceHeader"]}
        made["MessageSystemAttributes"] = {"AWSTraceHeader": header}
    if fifo_id is not None:
        made["MessageGroupId"] = system.get("MessageGroupId") or "broadway"
        made["MessageDeduplicationId"] = fifo_id
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
    if len(own) + len(why) <= limits.MAX_ATTRIBUTES:
        made = {**own, **{name: _string(value) for name, value in why.items()}}
        made["broadway_attempt"] = {"DataType": "Number", "StringValue": str(entry.attempt)}
        return made
    kept = dict(list(own.items())[: limits.MAX_ATTRIBUTES - 1])
    packed: dict[str, Any] = {name.removeprefix("broadway_"): value for name, value in why.items()}
    moved = {name: value_of(value) for name, value in own.items() if name not in kept}
    if moved:
        packed["attributes"] = moved
    return {**kept, _PACKED: _string(json.dumps(packed, ensure_ascii=False))}


def _string(value: str) -> dict[str, Any]:
    return {"DataType": "String", "StringValue": value}


def _attribute(value: Mapping[str, Any]) -> dict[str, Any]:
    if "binary_value" in value:
        raw = base64.b64decode(value["binary_value"])
        return {"DataType": value["data_type"], "BinaryValue": raw}
    return {"DataType": value["data_type"], "StringValue": value["string_value"]}


def _sendable(text: str, limit: int) -> str:
    """Cuts a text to ``limit`` bytes, and replaces characters that SQS refuses."""
    if limits.unsendable(text):
        text = "".join("�" if limits.unsendable(character) else character for character in text)
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def size_of(entry: Mapping[str, Any]) -> int:
    """Returns the bytes of an entry: body, and name, type and value of each attribute."""
    total = len(entry["MessageBody"].encode("utf-8", "surrogatepass"))
    for name, value in entry.get("MessageAttributes", {}).items():
        total += len(name.encode()) + len(value["DataType"].encode())
        content = value.get("BinaryValue")
        total += len(content if content is not None else value["StringValue"].encode("utf-8"))
    return total


# -- a letter, read --------------------------------------------------------------------------------


def letter_of(raw: Mapping[str, Any], queue: str) -> DeadLetter:
    """Reads a letter, by us or by SQS's own redrive, which states no reason.

    :param queue: The queue that the pipeline drains.
    """
    attributes = raw.get("MessageAttributes") or {}
    packed = _packed_of(attributes)

    def stated(name: str) -> str:
        value = attributes.get(f"broadway_{name}", {}).get("StringValue", packed.get(name, ""))
        return value if isinstance(value, str) else ""

    system = system_of(raw)
    message_id = stated("message_id")
    return DeadLetter(
        message_id=raw["MessageId"],
        body=raw["Body"].encode("utf-8", "surrogatepass"),
        properties=properties_as_json({**raw, "MessageAttributes": _own(attributes)}),
        reason=stated("reason"),
        stage=stated("stage"),
        attempt=attempt_of(stated("attempt")),
        enqueued_at=None,
        died_at=_instant(system.get("SentTimestamp")) if message_id else None,
        generation="",
        # The queue that SQS itself moved it from, else the claim of the letter.
        origin=system.get("DeadLetterQueueSourceArn", "").rpartition(":")[2]
        or stated("queue")
        or queue,
        original_id=message_id or raw["MessageId"],
    )


def _own(attributes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the message's own attributes, as boto3 takes them.

    :param attributes: Those of its letter, as boto3 gives them.
    """
    packed = _packed_of(attributes)
    own = {
        name: {key: attribute[key] for key in _ATTRIBUTE if key in attribute}
        for name, attribute in attributes.items()
        if name not in _OURS and not (name == _PACKED and packed)
    }
    moved = packed.get("attributes")
    for name, attribute in moved.items() if isinstance(moved, dict) else ():
        own[name] = _attribute(attribute)
    return own


def _instant(milliseconds: str | None) -> datetime | None:
    try:
        return datetime.fromtimestamp(int(milliseconds or "") / 1000, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None


def sent_back(raw: Mapping[str, Any], message_id: str, *, fifo: bool) -> dict[str, Any]:
    """Makes the entry of ``SendMessageBatch`` that sends a letter back, without its ``Id``.

    :param raw: The letter as SQS delivers it.
    :param message_id: The id that the message had.
    :param fifo: Whether it goes to a FIFO queue.
    """
    attributes = _own(raw.get("MessageAttributes") or {})
    if len(attributes) < limits.MAX_ATTRIBUTES:
        attributes[limits.REQUEUED] = _string(message_id)
    else:
        name = list(attributes)[-1]
        packed = {"requeued": message_id, "attributes": {name: value_of(attributes.pop(name))}}
        attributes[_PACKED] = _string(json.dumps(packed, ensure_ascii=False))
    made = {"MessageBody": raw["Body"], "MessageAttributes": attributes}
    # The letter's own: by that of the message SQS might take it for one that was just sent.
    return _addressed(made, system_of(raw), raw["MessageId"] if fifo else None)


def received_again(attributes: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the attributes of a message that was a dead letter and was sent back, as they were at
    first, with our mark; ``None``: it never was one.
    """
    if limits.REQUEUED not in attributes and _PACKED not in attributes:
        return None
    packed = _packed_of(attributes)
    if "requeued" in packed:
        moved = packed.get("attributes")
        own = {name: attribute for name, attribute in attributes.items() if name != _PACKED}
        back = moved.items() if isinstance(moved, dict) else ()
        mark = {limits.REQUEUED: _string(str(packed["requeued"]))}
        return own | {name: _attribute(attribute) for name, attribute in back} | mark
    return attributes if limits.REQUEUED in attributes else None


def _packed_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the attribute that has what there was no room for; empty if it is not ours."""
    text = attributes.get(_PACKED, {}).get("StringValue")
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict) or not {"message_id", "requeued"} & value.keys():
        return {}
    return value


# -- the place -------------------------------------------------------------------------------------


def publisher_of(queue: Queue) -> Publisher:
    """Sends messages to a queue."""
    return Publisher(queue.send, "SendMessage", size_of, limits.MAX_BATCH, limits.MAX_BODY_FORMERLY)


class SqsDeadLetters(EngineDeadLetters):
    """The letters in one queue."""

    def count(self) -> int:
        """Counts about, as SQS does, with letters that are hidden while they are listed."""
        attributes = self.dead.attributes("All")
        return sum(count_of(attributes, which) for which in ("", "NotVisible", "Delayed"))

    def fetch(self) -> list[Received]:
        request = {
            "MaxNumberOfMessages": limits.MAX_BATCH,
            "VisibilityTimeout": self.hidden_seconds,
            "WaitTimeSeconds": _WAIT_SECONDS,
            "MessageSystemAttributeNames": ["All"],
            "MessageAttributeNames": ["All"],
        }
        return [
            Received(raw["MessageId"], raw["ReceiptHandle"], raw, receives_of(raw))
            for raw in self.dead.receive(request)
        ]

    def limit(self) -> tuple[int | None, str]:
        try:
            policy = redrive_of(self.dead.attributes("RedrivePolicy"))
        except Denied:  # what SQS then moves goes to yet another queue, and is not deleted
            policy = {}
        return int(policy.get("maxReceiveCount") or 0) or None, "maxReceiveCount"

    def publisher(self, name: str) -> Publisher:
        queue: Queue = self.source.client
        return publisher_of(queue if name == queue.name else queue.other(name))

    def back(self, letter: DeadLetter, received: Received, to: str) -> dict[str, Any]:
        fifo = to.endswith(".fifo")
        return sent_back(received.raw, letter.original_id, fifo=fifo)

    def letter(self, received: Received) -> DeadLetter:
        return letter_of(received.raw, self.source.name)
