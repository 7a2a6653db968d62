"""Converts Kafka records into messages, with Broadway's metadata.

Keys and header values are bytes.  Their text is UTF-8 where they decode, else ``base64:`` and their
Base64, so that metadata is JSON and lossless.

A record of a retry topic is a copy of a failed message, with additional ``broadway.`` headers.  Its
message keeps the id, partition, offset and timestamp of the original.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.schema.encoding import BASE64
from airflow_broadway.producers.kafka.options import key_group

#: The prefixes of the headers that describe a dead letter.
_OURS: Final = ("__connect.errors.", "broadway.")
#: The header of a requeued dead letter: the id of its original message.
REQUEUED: Final = "broadway.requeued"
#: The header of a message in a retry topic: when it is due, in milliseconds since the epoch.
NOT_BEFORE: Final = "broadway.not-before"

#: librdkafka's timestamp type ``TIMESTAMP_NOT_AVAILABLE``.
_NO_TIME: Final = 0


def is_ours(name: str) -> bool:
    """Returns whether a header describes a dead letter, or a requeued one."""
    return name.startswith(_OURS)


def is_of_retry(name: str) -> bool:
    """Returns whether a header describes a copy in a retry topic."""
    return name.startswith("broadway.") and name != REQUEUED


def as_text(value: Any) -> str | None:
    """Returns a key or header value as text; ``None`` stays ``None``."""
    if value is None or type(value) is str:
        return value
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        return BASE64 + base64.b64encode(value).decode("ascii")


class Copy(NamedTuple):
    """A record of a retry topic, presented as the original message.

    :param own_offset: The offset of the original message.
    :param attempts: Recorded failures.
    :param not_before: Seconds since the epoch before which it is not due.
    :param sent: The original timestamp in milliseconds since the epoch; ``None``: unknown.
    :param generation: The generation in which the message failed.
    """

    record: Any
    topic: str
    partition: int
    own_offset: int
    attempts: int
    not_before: float
    sent: int | None
    generation: str

    @property
    def message_id(self) -> str:
        """The id of the original message."""
        return f"{self.topic}-{self.partition}-{self.own_offset}"

    @property
    def receipt(self) -> str:
        """The topic, partition and offset of the copy."""
        return f"@{self.record.topic()}-{self.record.partition()}-{self.record.offset()}"

    def offset(self) -> int:
        """Returns the offset of the original message."""
        return self.own_offset

    def value(self) -> Any:
        """Returns the message's value."""
        return self.record.value()

    def key(self) -> Any:
        """Returns the message's key."""
        return self.record.key()

    def timestamp(self) -> tuple[int, int]:
        """Returns the timestamp of the original message."""
        return (_NO_TIME, 0) if self.sent is None else (_NO_TIME + 1, self.sent)

    def headers(self) -> list[tuple[str, Any]]:
        """Returns the headers of the original message."""
        return [(n, value) for n, value in self.record.headers() or () if not is_of_retry(n)]


def copy_of(record: Any, group: str) -> Copy | None:
    """Parses a record of a retry topic.

    :param group: The consumer group; copies of other groups are ignored.
    :returns: ``None`` if the record is not a copy for this group.
    """
    fields = {n: as_text(value) or "" for n, value in record.headers() or () if is_of_retry(n)}
    if fields.get("broadway.group") != group:
        return None
    try:
        sent = fields.get("broadway.timestamp")
        return Copy(
            record,
            fields["broadway.topic"],
            int(fields["broadway.partition"]),
            int(fields["broadway.offset"]),
            int(fields["broadway.attempt"]),
            int(fields[NOT_BEFORE]) / 1000,
            int(sent) if sent else None,
            fields["broadway.generation"],
        )
    except (KeyError, ValueError):
        return None


class Records:
    """Builds the messages of one generation.

    :param by_key: Whether order is kept per key; the receipt of each message then names its key
        group.
    """

    def __init__(self, generation: str, *, by_key: bool) -> None:
        self._generation = generation
        self._by_key = by_key

    def messages(
        self,
        topic: str,
        partition: int,
        records: Iterable[Any],
        marks: Iterable[tuple[int, bool]] | None,
        at: datetime,
        position: int,
        receipt: str = "",
    ) -> list[Message]:
        """Builds the messages for records of one partition.

        :param marks: The attempt and the redelivered flag of each record; ``None``: all are new.
        :param position: The position of the first message; it increases by one per message.
        :param receipt: A suffix for the receipt of each message.
        """
        prefix, key_of = f"{topic}-{partition}-", as_text
        plain = ref = AckRef(None, self._generation, Delivery(receipt=receipt))
        batch_key = (topic, partition)
        known = iter(marks) if marks is not None else None
        attempt, redelivered = 1, False
        messages: list[Message] = []
        for record in records:
            offset, value = record.offset(), record.value()
            key, headers = record.key(), record.headers()
            kind, timestamp = record.timestamp()
            if key is not None:
                key = key_of(key)
            if known is not None:
                attempt, redelivered = next(known)
            requeued = bool(headers) and any(name == REQUEUED for name, _ in headers)
            if self._by_key:
                delivery = Delivery(receipt=key_group(key) + receipt)
                ref = plain if key is None else AckRef(None, self._generation, delivery)
            messages.append(
                Message(
                    value,
                    metadata={
                        "topic": topic,
                        "partition": partition,
                        "offset": offset,
                        "key": key,
                        "ts": timestamp if kind != _NO_TIME else None,
                        "headers": [[n, key_of(v)] for n, v in headers] if headers else [],
                    },
                    acknowledger=ref,
                    message_id=f"{prefix}{offset}",
                    batch_key=batch_key,
                    attempt=attempt,
                    redelivered=redelivered or requeued,
                    received_at=at,
                    position=position,
                    size=0 if value is None else len(value),
                )
            )
            position += 1
        return messages
