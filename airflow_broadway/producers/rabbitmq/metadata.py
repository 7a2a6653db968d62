"""What a message's metadata holds: the fields that the option ``metadata`` names, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.amqp.properties import FIELDS, decode, plain
from airflow_broadway.producers.rabbitmq.amqp.wire import split_route
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.marks import MARK, ORIGINAL

__all__ = ["Describer"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Describer:
    """Makes the metadata of messages."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._decodes = any(name in FIELDS or name == "persistent" for name in names)

    def __call__(self, held: Held) -> Mapping[str, Any]:
        """The metadata of one message: JSON values."""
        if not self._names:
            return _NOTHING
        known: dict[str, Any] = {}
        if self._decodes:
            try:
                known = decode(held.properties)
            except ProducerError as error:
                return {"unreadable": str(error)}
        known["redelivered"] = held.redelivered
        known["persistent"] = known.pop("delivery_mode", 1) == 2
        known["exchange"], known["routing_key"] = split_route(held.route)
        headers = known.get("headers")
        if headers:
            known["headers"] = {k: v for k, v in headers.items() if k not in (MARK, ORIGINAL)}
        return {name: plain(known.get(name)) for name in self._names}
