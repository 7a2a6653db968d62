"""Makes messages of what is secured, with the metadata that the option of that name asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq.amqp import properties as codec
from airflow_broadway.producers.rabbitmq.amqp.wire import split_route
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.marks import MARK, ORIGINAL
from airflow_broadway.producers.rabbitmq.options import FIELDS

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class MessageMaker:
    """Makes the messages of one generation, in the order of their positions.

    :param metadata: The names of what their metadata holds.
    :param actions: ``on_success`` and ``on_failure`` of every message, where the pipeline's own
        producer says otherwise.
    """

    def __init__(
        self,
        generation: str,
        metadata: Sequence[str],
        clock: Clock,
        actions: Mapping[str, str],
    ) -> None:
        self._generation = generation
        self._actions = dict(actions)
        self._names = tuple(metadata)
        self._decodes = any(name in FIELDS or name == "persistent" for name in metadata)
        self._clock = clock
        self._position = 0
        #: Messages of one publisher have the same properties.
        self._text = lru_cache(maxsize=10_000)(codec.staged_text)

    def __call__(self, held: Iterable[Held]) -> list[Message]:
        """The messages of ``held``."""
        now = self._clock.now()
        generation, text_of, describe = self._generation, self._text, self._describe
        actions = self._actions
        made = []
        for place, message in enumerate(held, self._position):
            text = text_of(message.route, message.properties, message.redelivered)
            body = message.body
            made.append(
                Message(
                    body,
                    metadata=describe(message),
                    acknowledger=AckRef(
                        None, generation, Delivery(payload=body, properties=text, **actions)
                    ),
                    message_id=message.message_id,
                    attempt=message.attempt,
                    redelivered=message.redelivered,
                    received_at=now,
                    position=place,
                    size=len(body),
                )
            )
        self._position += len(made)
        return made

    def _describe(self, held: Held) -> Mapping[str, Any]:
        """Returns the metadata of one message: JSON values."""
        if not self._names:
            return _NOTHING
        known: dict[str, Any] = {}
        if self._decodes:
            try:
                known = codec.decode(held.properties)
            except ProducerError as error:
                return {"unreadable": str(error)}
        known["redelivered"] = held.redelivered
        known["persistent"] = known.pop("delivery_mode", 1) == 2
        known["exchange"], known["routing_key"] = split_route(held.route)
        headers = known.get("headers")
        if headers:
            known["headers"] = {k: v for k, v in headers.items() if k not in (MARK, ORIGINAL)}
        return {name: codec.json_value(known.get(name)) for name in self._names}
