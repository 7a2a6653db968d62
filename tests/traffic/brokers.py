"""The broker interface of the traffic tests: publishes and drains with the broker's client library.

The adapters do not use the package, except to unpack RabbitMQ's bundles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tests.traffic.publisher import Sender

#: Lease of the pipelines, in seconds.
LEASE = 120.0

#: The place of dead letters, see :class:`QueuedMessage`.
DEAD = "dead"


class QueuedMessage(NamedTuple):
    """A message that is still in a queue.

    :param place: The queue: ``source``, ``returns``, ``delay``, ``leased`` or ``dead``.
    :param marked: Whether it will be marked as redelivered when it is received.
    """

    number: int
    place: str
    marked: bool


class BrokerAdapter(Protocol):
    """Creates a queue at a broker, publishes to it, and drains it."""

    @property
    def kind(self) -> str:
        """The pipeline's name in ``PIPELINES``."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """The producer's options, as JSON values."""
        ...

    @property
    def connections(self) -> Mapping[str, Mapping[str, Any]]:
        """The Airflow connections by id."""
        ...

    def group_of(self, number: int) -> int | None:
        """Returns the message's ordering group; ``None`` if it is not ordered."""
        ...

    def is_unlocked(self) -> bool:
        """Returns whether other processes can use the queue: no stopped process has locked it."""
        ...

    def sender(self) -> Sender:
        """Returns the publisher of the queue."""
        ...

    def drain(self) -> list[QueuedMessage]:
        """Removes and returns all messages of all queues, including leased ones."""
        ...


@runtime_checkable
class Networked(Protocol):
    """A broker that can be reached through a proxy."""

    def address(self) -> tuple[str, int]:
        """Returns host and port of the server."""
        ...

    def use_proxy(self, port: int) -> None:
        """Makes the next runs connect to the proxy at this port."""
        ...


@runtime_checkable
class LeaseExpiring(Protocol):
    """A broker whose leases expire at a deadline, also if their process died."""

    def expire_leases(self) -> None:
        """Advances the broker's clock past the deadlines of all leases."""
        ...


@runtime_checkable
class Restartable(Protocol):
    """A broker whose server can be killed and restarted."""

    def restart(self) -> None:
        """Kills the server with SIGKILL and restarts it with the same files."""
        ...
