"""The broker interface of the living tests: publishes and drains with the broker's own client.

Nothing of this asks the package: the one exception is RabbitMQ's bundles, whose format is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tests.living.publisher import Sender

#: Seconds of the pipelines' leases.
LEASE = 120.0

#: The place of dead letters.
DEAD = "dead"


class Left(NamedTuple):
    """One message that lies in a queue.

    :param place: ``source``, ``returns``, ``delay``, ``leased`` or ``dead``.
    :param marked: Whether it will be received as possibly handled before.
    """

    number: int
    place: str
    marked: bool


class LivingBroker(Protocol):
    """One queue at one broker."""

    @property
    def kind(self) -> str:
        """The pipeline's name in ``PIPELINES``."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """The producer's options, JSON."""
        ...

    @property
    def connections(self) -> Mapping[str, Mapping[str, Any]]:
        """Connections by id."""
        ...

    def group_of(self, number: int) -> int | None:
        """The group within which the message is handled in order; ``None`` without order."""
        ...

    def free(self) -> bool:
        """Whether the queue is open to others, unlike a file whose writer is stopped."""
        ...

    def sender(self) -> Sender:
        """Returns the publisher of the queue."""
        ...

    def drain(self) -> list[Left]:
        """Takes everything out of all queues, those that are held by leases too."""
        ...


@runtime_checkable
class Networked(Protocol):
    """A broker that is reached over a network, so through a proxy too."""

    def address(self) -> tuple[str, int]:
        """Where a proxy reaches it."""
        ...

    def reached_by(self, port: int) -> None:
        """Lets runs go through a proxy at this port."""
        ...


@runtime_checkable
class Lapsing(Protocol):
    """A broker that holds what a process received and did not live to note, until a deadline."""

    def lapse(self) -> None:
        """Moves the broker's clock beyond the deadlines of all leases."""
        ...


@runtime_checkable
class Mortal(Protocol):
    """A broker with a server of its own, which may die."""

    def die(self) -> None:
        """``kill -9`` its server, and start that again on the same files."""
        ...
