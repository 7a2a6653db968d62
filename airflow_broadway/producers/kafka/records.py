"""Makes messages of Kafka's records: metadata as Broadway has it, bytes as text.

Keys and headers are bytes.  As text they are UTF-8, else ``base64:`` and their Base64: so metadata
is JSON, and nothing in it is lost.

A record of a retry topic is a copy of a message that failed, with headers of ours.  Its message has
the id, the place and the timestamp that it had in its own topic.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.schema.json_text import BASE64
from airflow_broadway.producers.kafka.options import key_group

#: The prefixes of a dead letter's headers, which say why it is one.
_OURS: Final = ("__connect.errors.", "broadway.")
#: The header of a message that was a dead letter and was sent back: its id at that time.
REQUEUED: Final = "broadway.requeued"
#: The header of a message in a retry topic: milliseconds since 1970 before which it is not read.
NOT_BEFORE: Final = "broadway.not-before"

#: The kind of a timestamp that is none.
_NO_TIME: Final = 0


def is_ours(name: str) -> bool:
    """Whether a header says why a message is a dead letter, or was one."""
    return name.startswith(_OURS)


def is_of_retry(name: str) -> bool:
    """Whether a header says why a message is in a retry topic."""
    return name.startswith("broadway.") and name != REQUEUED


def as_text(value: Any) -> str | None:
    """Returns the text of a key or a header's value; ``None`` for none."""
    if value is None or type(value) is str:
        return value
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        return BASE64 + base64.b64encode(value).decode("ascii")


class Copy(NamedTuple):
    """A record of a retry topic, as the message of which it is a copy.

    :param own_offset: The message's offset in its own topic.
    :param attempts: Recorded failures.
    :param not_before: Seconds since 1970 before which it is not read.
    :param sent: Milliseconds since 1970 at which the message was sent; ``None``: not known.
    :param generation: The generation that failed on it.
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
        """The message's id: its place in its own topic."""
        return f"{self.topic}-{self.partition}-{self.own_offset}"

    @property
    def receipt(self) -> str:
        """Where the copy is."""
        return f"@{self.record.topic()}-{self.record.partition()}-{self.record.offset()}"

    def offset(self) -> int:
        """Returns the message's offset in its own topic."""
        return self.own_offset

    def value(self) -> Any:
        """Returns the message's body."""
        return self.record.value()

    def key(self) -> Any:
        """Returns the message's key."""
        return self.record.key()

    def timestamp(self) -> tuple[int, int]:
        """Returns the message's timestamp."""
        return (_NO_TIME, 0) if self.sent is None else (_NO_TIME + 1, self.sent)

    def headers(self) -> list[tuple[str, Any]]:
        """Returns the message's headers."""
        return [(n, value) for n, value in self.record.headers() or () if not is_of_retry(n)]


def copy_of(record: Any, group: str) -> Copy | None:
    """Reads a record of a retry topic as a copy.

    :param group: The consumer group; copies of other groups are not of interest.
    :returns: ``None`` if it is no such copy.
    """
    ours = {n: as_text(value) or "" for n, value in record.headers() or () if is_of_retry(n)}
    if ours.get("broadway.group") != group:
        return None
    try:
        sent = ours.get("broadway.timestamp")
        return Copy(
            record,
            ours["broadway.topic"],
            int(ours["broadway.partition"]),
            int(ours["broadway.offset"]),
            int(ours["broadway.attempt"]),
            int(ours[NOT_BEFORE]) / 1000,
            int(sent) if sent else None,
            ours["broadway.generation"],
        )
    except (KeyError, ValueError):
        return None


class Records:
    """Makes the messages of one generation.

    :param by_key: Whether the messages of a key stay in order: then each carries its key's group to
        where it is settled.
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
        """Makes the messages of records of one partition.

        :param marks: The attempt of each, and whether it is redelivered; ``None``: all are new.
        :param position: The first message's; the others count on from it.
        :param receipt: What is added to the receipt of each.
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
            again = bool(headers) and any(name == REQUEUED for name, _ in headers)
            if self._by_key:
                own = Delivery(receipt=key_group(key) + receipt)
                ref = plain if key is None else AckRef(None, self._generation, own)
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
                    redelivered=redelivered or again,
                    received_at=at,
                    position=position,
                    size=0 if value is None else len(value),
                )
            )
            position += 1
        return messages
