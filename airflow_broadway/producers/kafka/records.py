"""From what Kafka hands out to messages: metadata as Broadway has it, bytes as text.

Keys and headers are bytes.  As text they are what UTF-8 makes of them, else ``base64:`` and their
Base64: so metadata is JSON, and nothing in it is lost.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.schema.json_text import BASE64
from airflow_broadway.producers.kafka.options import key_group

__all__ = ["REQUEUED", "Records", "as_text"]

#: The header of a message that was a dead letter and was sent back: its id at that time.
REQUEUED: Final = "broadway.requeued"

#: The kind of an instant that is none.
_NO_TIME: Final = 0


def as_text(value: Any) -> str | None:
    """The text of a key or a header's value; ``None`` for none."""
    if value is None or type(value) is str:
        return value
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        return BASE64 + base64.b64encode(value).decode("ascii")


class Records:
    """Makes messages for one generation.

    :param by_key: Whether the messages of a key stay in order: then each carries its key's name to
        where it is settled.
    """

    def __init__(self, generation: str, *, by_key: bool) -> None:
        self._generation = generation
        self._by_key = by_key
        self._ref = AckRef(None, generation, Delivery())

    def messages(
        self,
        topic: str,
        partition: int,
        records: Iterable[Any],
        marks: Iterable[tuple[int, bool]] | None,
        at: datetime,
        position: int,
    ) -> list[Message]:
        """The messages of records of one partition.

        :param marks: The attempt of each, and whether it is redelivered; ``None``: all are new.
        :param position: The first message's; the others count on from it.
        """
        prefix, key_of, ref = f"{topic}-{partition}-", as_text, self._ref
        batch_key = (topic, partition)
        known = iter(marks) if marks is not None else None
        attempt, redelivered = 1, False
        made: list[Message] = []
        for record in records:
            offset, value = record.offset(), record.value()
            key, headers = record.key(), record.headers()
            kind, instant = record.timestamp()
            if key is not None:
                key = key_of(key)
            if known is not None:
                attempt, redelivered = next(known)
            again = bool(headers) and any(name == REQUEUED for name, _ in headers)
            if self._by_key and key is not None:
                ref = AckRef(None, self._generation, Delivery(receipt=key_group(key)))
            elif self._by_key:
                ref = self._ref
            made.append(
                Message(
                    value,
                    metadata={
                        "topic": topic,
                        "partition": partition,
                        "offset": offset,
                        "key": key,
                        "ts": instant if kind != _NO_TIME else None,
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
        return made
