"""Parses SQS messages, and builds, lists and requeues dead letters.

A dead letter has the original body, and the reason in message attributes within SQS's limits.
``broadway_reason``, ``broadway_stage``, ``broadway_attempt``, ``broadway_message_id`` and
``broadway_queue`` are added to the message's own attributes.  A message may have ten attributes.
If five more do not fit, the attribute ``broadway`` contains all of them as JSON; a tenth attribute
of the message then moves into ``broadway`` too.

SQS treats a requeued dead letter as a new message.  So it has ``broadway_requeued`` with its
original id, and is received as redelivered.  If that attribute does not fit, it is in ``broadway``
too.
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

#: The attributes of a dead letter; they replace those of an earlier dead letter after a redrive.
_OURS: Final = frozenset(
    f"broadway_{name}" for name in ("message_id", "queue", "attempt", "stage", "reason", "requeued")
)
#: The attribute that contains all others as JSON if they do not fit.
_PACKED: Final = "broadway"
#: The fields of a message attribute that boto3 accepts.
_ATTRIBUTE: Final = ("DataType", "StringValue", "BinaryValue")
#: The long poll of a receive of dead letters, in seconds, so that SQS queries all of its servers.
#: An empty response is the end.
_WAIT_SECONDS = 1
#: Bytes of a shortened reason, for a message near the size limit.
_SHORT: Final = 64


# -- parsing messages ------------------------------------------------------------------------------


def system_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the system attributes of a message."""
    value = raw.get("Attributes")
    return value if isinstance(value, Mapping) else {}


def receives_of(raw: Mapping[str, Any]) -> int:
    """Returns the receive count of a message, including this receive."""
    count = number_of(system_of(raw).get("ApproximateReceiveCount", 1))
    return count if isinstance(count, int) and count > 0 else 1


def group_of(raw: Mapping[str, Any]) -> str:
    """Returns the message group; ``""`` if it has none."""
    return str(system_of(raw).get("MessageGroupId") or "")


def number_of(value: Any) -> Any:
    """Parses a number that SQS returns as text; other text is unchanged."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return as_text(value)


def as_text(value: Any) -> str:
    """Converts a value to text; other servers than SQS may return another type."""
    return value if isinstance(value, str) else "" if value is None else str(value)


def value_of(attribute: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message attribute as JSON."""
    kind = as_text(attribute.get("DataType", "String"))
    if "BinaryValue" in attribute:
        value = base64.b64encode(attribute["BinaryValue"]).decode("ascii")
        return {"data_type": kind, "binary_value": value}
    return {"data_type": kind, "string_value": as_text(attribute.get("StringValue"))}


def properties_of(raw: Mapping[str, Any]) -> str:
    """Returns the properties that a dead letter of the message keeps, as JSON text."""
    properties = properties_as_json(raw)
    return json.dumps(properties, separators=(",", ":")) if properties else "{}"


def properties_as_json(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties that a dead letter keeps: attributes, group, deduplication id."""
    system = system_of(raw)
    properties: dict[str, Any] = {}
    if raw.get("MessageAttributes"):
        properties["attributes"] = {
            name: value_of(attribute) for name, attribute in raw["MessageAttributes"].items()
        }
    for name in ("MessageGroupId", "MessageDeduplicationId", "AWSTraceHeader"):
        if system.get(name):
            properties[name] = as_text(system[name])
    return properties


# -- building dead letters -------------------------------------------------------------------------


def letter(
    entry: Entry, queue: str, *, fifo: bool, max_bytes: int = limits.MAX_BODY
) -> dict[str, Any]:
    """Builds the entry of ``SendMessageBatch`` for one dead letter, without its ``Id``.

    :param entry: The entry, with payload and properties as received.
    :param queue: The name of the source queue.
    :param fifo: Whether the dead-letter queue is a FIFO queue.
    :param max_bytes: The maximum message size of the dead-letter queue.
    """
    properties: dict[str, Any] = json.loads(entry.properties or "{}")
    attributes = {
        name: _attribute(value)
        for name, value in properties.get("attributes", {}).items()
        if name not in _OURS
    }
    dead: dict[str, Any] = {"MessageBody": (entry.payload or b"").decode("utf-8", "surrogatepass")}
    for limit in (MAX_REASON, _SHORT, 0):
        dead["MessageAttributes"] = _attributes(entry, queue, attributes, limit)
        if size_of(dead) <= max_bytes:
            break
    else:  # at the size limit: only its own attributes are sent
        dead["MessageAttributes"] = attributes
    if not dead["MessageAttributes"]:
        del dead["MessageAttributes"]
    # SQS deduplicates a repeated send within five minutes, e.g. after a crash.
    return _add_routing(dead, properties, entry.message_id if fifo else None)


def _add_routing(
    message: dict[str, Any], system: Mapping[str, Any], fifo_id: str | None
) -> dict[str, Any]:
    """Adds the trace header, message group and deduplication id to an entry.

    :param fifo_id: The deduplication id, for a FIFO queue.
    """
    if system.get("AWSTraceHeader"):  # exempt from the limits on size and attributes
        header = {"DataType": "String", "StringValue": system["AWSTraceHeader"]}
        message["MessageSystemAttributes"] = {"AWSTraceHeader": header}
    if fifo_id is not None:
        message["MessageGroupId"] = system.get("MessageGroupId") or "broadway"
        message["MessageDeduplicationId"] = fifo_id
    return message


def _attributes(
    entry: Entry, queue: str, own: Mapping[str, Any], limit: int
) -> dict[str, dict[str, Any]]:
    reason = _sendable(entry.verdict.reason, limit)
    info = {
        "broadway_message_id": entry.message_id,
        "broadway_queue": queue,
        "broadway_attempt": str(entry.attempt),
        "broadway_stage": entry.verdict.stage,
        "broadway_reason": reason,
    }
    info = {name: value for name, value in info.items() if value}
    if len(own) + len(info) <= limits.MAX_ATTRIBUTES:
        attributes = {**own, **{name: _string(value) for name, value in info.items()}}
        attributes["broadway_attempt"] = {"DataType": "Number", "StringValue": str(entry.attempt)}
        return attributes
    unpacked = dict(list(own.items())[: limits.MAX_ATTRIBUTES - 1])
    packed: dict[str, Any] = {name.removeprefix("broadway_"): value for name, value in info.items()}
    moved = {name: value_of(value) for name, value in own.items() if name not in unpacked}
    if moved:
        packed["attributes"] = moved
    return {**unpacked, _PACKED: _string(json.dumps(packed, ensure_ascii=False))}


def _string(value: str) -> dict[str, Any]:
    return {"DataType": "String", "StringValue": value}


def _attribute(value: Mapping[str, Any]) -> dict[str, Any]:
    if "binary_value" in value:
        raw = base64.b64decode(value["binary_value"])
        return {"DataType": value["data_type"], "BinaryValue": raw}
    return {"DataType": value["data_type"], "StringValue": value["string_value"]}


def _sendable(text: str, limit: int) -> str:
    """Cuts a text to ``limit`` bytes, and replaces characters that SQS rejects."""
    if limits.unsendable(text):
        text = "".join("�" if limits.unsendable(character) else character for character in text)
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def size_of(entry: Mapping[str, Any]) -> int:
    """Returns the size of an entry in bytes: body, and name, type and value of each attribute."""
    total = len(entry["MessageBody"].encode("utf-8", "surrogatepass"))
    for name, value in entry.get("MessageAttributes", {}).items():
        total += len(name.encode()) + len(value["DataType"].encode())
        content = value.get("BinaryValue")
        total += len(content if content is not None else value["StringValue"].encode("utf-8"))
    return total


# -- parsing dead letters --------------------------------------------------------------------------


def letter_of(raw: Mapping[str, Any], queue: str) -> DeadLetter:
    """Parses a dead letter of this package, or of SQS's redrive, which has no reason.

    :param queue: The pipeline's queue.
    """
    attributes = raw.get("MessageAttributes") or {}
    packed = _packed_of(attributes)

    def field(name: str) -> str:
        value = attributes.get(f"broadway_{name}", {}).get("StringValue", packed.get(name, ""))
        return value if isinstance(value, str) else ""

    system = system_of(raw)
    message_id = field("message_id")
    return DeadLetter(
        message_id=raw["MessageId"],
        body=raw["Body"].encode("utf-8", "surrogatepass"),
        properties=properties_as_json({**raw, "MessageAttributes": _own_attributes(attributes)}),
        reason=field("reason"),
        stage=field("stage"),
        attempt=attempt_of(field("attempt")),
        enqueued_at=None,
        died_at=_timestamp(system.get("SentTimestamp")) if message_id else None,
        generation="",
        # The queue that SQS itself moved it from, else the attribute of the dead letter.
        origin=system.get("DeadLetterQueueSourceArn", "").rpartition(":")[2]
        or field("queue")
        or queue,
        original_id=message_id or raw["MessageId"],
    )


def _own_attributes(attributes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the attributes of the original message, in boto3's format.

    :param attributes: The attributes of its dead letter.
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


def _timestamp(milliseconds: str | None) -> datetime | None:
    try:
        return datetime.fromtimestamp(int(milliseconds or "") / 1000, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None


def sent_back(raw: Mapping[str, Any], message_id: str, *, fifo: bool) -> dict[str, Any]:
    """Builds the entry of ``SendMessageBatch`` that requeues a dead letter, without its ``Id``.

    :param raw: The dead letter as received.
    :param message_id: The id of the original message.
    :param fifo: Whether the destination is a FIFO queue.
    """
    attributes = _own_attributes(raw.get("MessageAttributes") or {})
    if len(attributes) < limits.MAX_ATTRIBUTES:
        attributes[limits.REQUEUED] = _string(message_id)
    else:
        name = list(attributes)[-1]
        packed = {"requeued": message_id, "attributes": {name: value_of(attributes.pop(name))}}
        attributes[_PACKED] = _string(json.dumps(packed, ensure_ascii=False))
    message = {"MessageBody": raw["Body"], "MessageAttributes": attributes}
    # The dead letter's id: by the original id, SQS might deduplicate a message just sent.
    return _add_routing(message, system_of(raw), raw["MessageId"] if fifo else None)


def received_again(attributes: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Restores the attributes of a requeued dead letter, with ``broadway_requeued``.

    :returns: ``None`` if the message is not a requeued dead letter.
    """
    if limits.REQUEUED not in attributes and _PACKED not in attributes:
        return None
    packed = _packed_of(attributes)
    if "requeued" in packed:
        moved = packed.get("attributes")
        own = {name: attribute for name, attribute in attributes.items() if name != _PACKED}
        restored = moved.items() if isinstance(moved, dict) else ()
        mark = {limits.REQUEUED: _string(str(packed["requeued"]))}
        return own | {name: _attribute(attribute) for name, attribute in restored} | mark
    return attributes if limits.REQUEUED in attributes else None


def _packed_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Parses the attribute ``broadway``; empty if another program wrote it."""
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


# -- the dead-letter queue -------------------------------------------------------------------------


def publisher_of(queue: Queue) -> Publisher:
    """Returns a publisher to a queue."""
    return Publisher(queue.send, "SendMessage", size_of, limits.MAX_BATCH, limits.MAX_BODY_FORMERLY)


class SqsDeadLetters(EngineDeadLetters):
    """The dead letters in one SQS queue."""

    def count(self) -> int:
        """Returns SQS's approximate count, including in-flight dead letters."""
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
        except Denied:  # without the limit: SQS moves dead letters on, and deletes none
            policy = {}
        return int(policy.get("maxReceiveCount") or 0) or None, "maxReceiveCount"

    def publisher(self, name: str) -> Publisher:
        queue: Queue = self.source.client
        return publisher_of(queue if name == queue.name else queue.other(name))

    def back(self, letter: DeadLetter, received: Received, to: str) -> dict[str, Any]:
        return sent_back(received.raw, letter.original_id, fifo=to.endswith(".fifo"))

    def letter(self, received: Received) -> DeadLetter:
        return letter_of(received.raw, self.source.name)
