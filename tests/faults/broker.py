"""The broker interface of the fault tests, independent of the package's reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class DeadLetter(NamedTuple):
    """One dead letter.

    :param marked: Whether it is marked as a possible duplicate.
    """

    number: int
    attempt: int
    reason: str
    marked: bool = False


class Broker(Protocol):
    """A queue called ``killed``, at a broker that only this run uses.

    :param stable_ids: Whether a message keeps one id across crashes.  A message without an id from
        the broker gets one when it is received, and another one if its receiver dies between
        securing and acknowledging it.  Then both copies are marked, and each is settled.
    """

    @property
    def stable_ids(self) -> bool: ...

    def variables(self) -> Mapping[str, str]:
        """Returns the environment variables that define Airflow's connections."""
        ...

    def send(self, bodies: Sequence[bytes]) -> None:
        """Enqueues messages."""
        ...

    def waiting(self) -> int:
        """Counts the messages that are ready, delayed or leased."""
        ...

    def leased(self) -> int:
        """Counts open leases, or messages that are in flight."""
        ...

    def dead_letters(self) -> list[DeadLetter]:
        """Reads all dead letters."""
        ...

    def close(self) -> None:
        """Stops the broker, or closes its client."""
        ...
