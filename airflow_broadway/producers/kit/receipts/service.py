"""What each broker of receipts does in its own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import ClassVar

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kit.receipts.batch_requests import Call
from airflow_broadway.producers.kit.receipts.polls import Answer, Received

__all__ = ["ReceiptService"]


class ReceiptService(ABC):
    """One queue at its broker, as :class:`ReceiptSource` asks it."""

    #: The broker's and its queue's names, for people.
    service: ClassVar[str]
    queue_word: ClassVar[str]
    #: Errors after which nothing more is received, though what was received is handled.
    full: ClassVar[tuple[type[ProducerError], ...]] = ()
    #: Errors that no waiting mends, though another process may succeed.
    ends: ClassVar[tuple[type[ProducerError], ...]] = ()

    @abstractmethod
    def _receive(self, count: int) -> Answer:
        """Make one receive of at most so many messages, and hold them; in any thread."""

    @abstractmethod
    def _hide_call(self) -> Call:
        """One request that hides messages for a while; its entries are those of `_hidden`."""

    @abstractmethod
    def _hidden(self, receipt: str, seconds: int) -> object:
        """An entry that hides a message for so long; 0: it is shown at once."""

    @abstractmethod
    def _attempts(
        self, fresh: Mapping[str, Received], now: datetime
    ) -> Callable[[str], tuple[int, bool]]:
        """What tells of each of these: its attempt, and whether it may have been handed out."""

    @abstractmethod
    def _message(
        self, each: Received, *, attempt: int, redelivered: bool, at: datetime, position: int
    ) -> Message:
        """The message.

        :raises Exception: Any, if it cannot be read.
        """

    def _groups(self, fresh: Mapping[str, Received]) -> dict[str, str]:
        """Message id → the group in which it keeps its order, if any."""
        return {}

    def _explain_empty(self) -> None:  # noqa: B027 (most have nothing to say)
        """Say why nothing comes if there is something."""

    def _lost(self) -> list[tuple[float, Received]]:
        """What receives brought whose answer was lost, if it can be had."""
        return []

    @abstractmethod
    def _disconnect(self) -> None:
        """Release connections."""
