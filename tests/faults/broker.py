"""The broker interface of the fault tests, independent of our reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Dead(NamedTuple):
    """One dead letter.

    :param marked: Whether it is marked as a possible duplicate.
    """

    number: int
    attempt: int
    reason: str
    marked: bool = False


class Broker(Protocol):
    """A queue called ``killed`` at a broker of this run's own.

    :param stable_ids: Whether a message keeps one id across crashes.  Without an id by the broker,
        it gets one at its first receipt, and a second one if its receiver died between securing it
        and acknowledging it; then both copies are marked, and each is settled.
    """

    @property
    def stable_ids(self) -> bool: ...

    def variables(self) -> Mapping[str, str]:
        """Environment variables for Airflow: the connections."""
        ...

    def send(self, bodies: Sequence[bytes]) -> None:
        """Enqueues messages."""
        ...

    def waiting(self) -> int:
        """Messages that are neither settled nor dead: ready, delayed or leased."""
        ...

    def leased(self) -> int:
        """Leases that are open, or what else still holds messages."""
        ...

    def dead(self) -> list[Dead]:
        """All dead letters."""
        ...

    def close(self) -> None:
        """Stops what was started."""
        ...
