"""What is asked of SQS in one receive, and the messages that are made of its answer."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.sqs.dead_letters import received_again
from airflow_broadway.producers.sqs.limits import MAX_BATCH
from airflow_broadway.producers.sqs.options import SYSTEM_ATTRIBUTES, SqsOptions

__all__ = [
    "Reader",
    "as_json",
    "asked",
    "group_of",
    "receives_of",
    "request_of",
]

_OURS: Final = {theirs: ours for ours, theirs in SYSTEM_ATTRIBUTES.items()}
_NUMBERS: Final = frozenset(
    {"SentTimestamp", "ApproximateReceiveCount", "ApproximateFirstReceiveTimestamp"}
)
#: What custody itself needs of each message.
_NEEDED: Final = ("ApproximateReceiveCount", "AWSTraceHeader")
_NEEDED_FIFO: Final = (
    *_NEEDED,
    "MessageGroupId",
    "MessageDeduplicationId",
    "SequenceNumber",
)


def asked(producer: SqsOptions, demand: int) -> dict[str, Any]:
    """The producer's options as one receive has them: what is unset is left out, 0 is not."""
    options = {
        "max_number_of_messages": min(demand, producer.max_number_of_messages, MAX_BATCH),
        "wait_time_seconds": producer.wait_time_seconds,
        "visibility_timeout": producer.visibility_timeout,
        "attribute_names": producer.attribute_names,
        "message_attribute_names": producer.message_attribute_names,
    }
    return {name: value for name, value in options.items() if value is not None}


def request_of(producer: SqsOptions, demand: int) -> dict[str, Any]:
    """The arguments of one ``ReceiveMessage``.

    Beside the options it asks for what custody needs: the visibility timeout, which is the lease,
    the receive count, what a dead letter keeps, and of a FIFO queue the group.  A FIFO receive that
    is sent again after its answer was lost gets that answer.
    """
    given = asked(producer, demand)
    request: dict[str, Any] = {
        "MaxNumberOfMessages": given["max_number_of_messages"],
        "VisibilityTimeout": given.get("visibility_timeout", producer.visibility),
    }
    if "wait_time_seconds" in given:
        request["WaitTimeSeconds"] = int(given["wait_time_seconds"])
    needed = _NEEDED_FIFO if producer.fifo else _NEEDED
    names = given.get("attribute_names", ())
    if names == "all":
        request["MessageSystemAttributeNames"] = ["All"]
    else:
        wanted = dict.fromkeys([*needed, *(SYSTEM_ATTRIBUTES[name] for name in names)])
        request["MessageSystemAttributeNames"] = list(wanted)
    request["MessageAttributeNames"] = ["All"]  # a dead letter keeps all of its attributes
    if producer.fifo:
        request["ReceiveRequestAttemptId"] = uuid.uuid4().hex
    return request


class Reader:
    """Makes messages of what SQS hands out, with metadata as the options want it."""

    def __init__(self, producer: SqsOptions, generation: str = "") -> None:
        self._generation = generation
        names = producer.attribute_names
        self._all = names == "all"
        chosen = () if names is None or self._all else names
        self._system = frozenset(SYSTEM_ATTRIBUTES[name] for name in chosen)
        if producer.fifo:
            self._system |= {"MessageGroupId"}
        own = producer.message_attribute_names
        self._selected = () if own is None or own == "all" else tuple(own)
        self._any = own == "all"

    def message(
        self,
        raw: Mapping[str, Any],
        *,
        attempt: int,
        redelivered: bool,
        at: datetime,
        position: int,
    ) -> Message:
        """The message.

        :param redelivered: As SQS counts; one that was a dead letter is redelivered too.
        :raises Exception: Any, if SQS's answer lacks what every message has.
        """
        again = received_again(raw.get("MessageAttributes") or {})
        if again is not None:
            raw, redelivered = {**raw, "MessageAttributes": again}, True
        body = raw["Body"].encode("utf-8", "surrogatepass")
        delivery = Delivery(payload=body, properties=_properties_of(raw))
        return Message(
            body,
            metadata=self.metadata(raw),
            acknowledger=AckRef(None, self._generation, delivery),
            message_id=raw["MessageId"],
            attempt=attempt,
            redelivered=redelivered,
            received_at=at,
            position=position,
            size=len(body),
        )

    def metadata(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Broadway's metadata of one message: all that SQS says but the body."""
        attributes: dict[str, Any] = {}
        if self._all or self._system:
            for name, value in _system(raw).items():
                if self._all or name in self._system:
                    attributes[_OURS.get(name, name)] = (
                        _number(value) if name in _NUMBERS else _as_text(value)
                    )
        own = raw.get("MessageAttributes")
        return {
            "message_id": raw["MessageId"],
            "receipt_handle": raw["ReceiptHandle"],
            "md5_of_body": _as_text(raw.get("MD5OfBody")),
            "attributes": attributes,
            "message_attributes": self._own(own) if own else {},
        }

    def _own(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: _value(each)
            for name, each in given.items()
            if self._any or any(_matches(name, pattern) for pattern in self._selected)
        }


def _system(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """SQS's own attributes of a message."""
    value = raw.get("Attributes")
    return value if isinstance(value, Mapping) else {}


def receives_of(raw: Mapping[str, Any]) -> int:
    """How often SQS has handed the message out, this time included."""
    count = _number(_system(raw).get("ApproximateReceiveCount", 1))
    return count if isinstance(count, int) and count > 0 else 1


def group_of(raw: Mapping[str, Any]) -> str:
    """The message group; ``""`` if it has none."""
    return str(_system(raw).get("MessageGroupId") or "")


def _number(value: Any) -> Any:
    """A number that SQS gives as text; what is none stays as it came."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return _as_text(value)


def _as_text(value: Any) -> str:
    """What SQS gives as text; of another server's answer its text."""
    return value if isinstance(value, str) else "" if value is None else str(value)


def _matches(name: str, pattern: str) -> bool:
    if pattern in ("All", ".*"):
        return True
    if pattern.endswith(".*"):
        return name.startswith(pattern[:-2])
    return name == pattern


def _value(attribute: Mapping[str, Any]) -> dict[str, Any]:
    kind = _as_text(attribute.get("DataType", "String"))
    if "BinaryValue" in attribute:
        return {"data_type": kind, "binary_value": _text(attribute["BinaryValue"])}
    return {"data_type": kind, "string_value": _as_text(attribute.get("StringValue"))}


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _properties_of(raw: Mapping[str, Any]) -> str:
    """What a dead letter of the message keeps, as text."""
    kept = as_json(raw)
    return json.dumps(kept, separators=(",", ":")) if kept else "{}"


def as_json(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a dead letter of the message keeps, as JSON: attributes, group, deduplication id."""
    system = _system(raw)
    kept: dict[str, Any] = {}
    if raw.get("MessageAttributes"):
        kept["attributes"] = {name: _value(each) for name, each in raw["MessageAttributes"].items()}
    for name in ("MessageGroupId", "MessageDeduplicationId", "AWSTraceHeader"):
        if system.get(name):
            kept[name] = _as_text(system[name])
    return kept
