"""What is secured and waits to be handed out: here the run's thread and the connection's meet."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.producers.rabbitmq.bundle import Held

log = logging.getLogger(__name__)

#: Messages that are named in the log when they are set aside; the others are counted.
_LOGGED = 10


class Aside(NamedTuple):
    """A message that goes among the dead letters without being handled.

    :param kind: ``oversized`` or ``bundle``.
    """

    message_id: str
    kind: str
    reason: str


class Buffer:
    """Secured messages in their order, and how many more may come; for all threads.

    A message is *under way* from being taken out of its queue until it is handed out.  No more than
    ``credit`` are taken: what the run has demanded, less what it was given.
    """

    def __init__(self) -> None:
        #: Held while several of the fields are read together; notified when one has changed.
        self.changed = threading.Condition()
        self.credit = 0
        self.under_way = 0
        #: Bundles that were secured, in all.
        self.bundles = 0
        #: Messages that were set aside unprocessed, by kind.
        self.set_aside: Counter[str] = Counter()
        #: Why nothing more comes.
        self.error: BroadwayError | None = None
        self._waiting: deque[list[Held]] = deque()

    @property
    def empty(self) -> bool:
        """Whether nothing waits to be handed out."""
        return not self._waiting

    # -- the thread of the run -----------------------------------------------------------------

    def demand(self, count: int) -> None:
        """Let so many messages be under way."""
        with self.changed:
            self.credit = count

    def take(self, demand: int) -> list[Held]:
        """Hand out at most ``demand`` messages."""
        taken: list[Held] = []
        with self.changed:
            while self._waiting and len(taken) < demand:
                head = self._waiting[0]
                room = demand - len(taken)
                if len(head) <= room:
                    taken += self._waiting.popleft()
                else:
                    taken += head[:room]
                    self._waiting[0] = head[room:]
            self.under_way -= len(taken)
            self.credit -= len(taken)  # nobody asked for others in their place yet
        return taken

    def take_all(self) -> list[Held]:
        """Hand out everything; what else was under way is its queue's again."""
        with self.changed:
            taken = self.take(self._count())
            self.under_way = 0
        return taken

    def begin(self) -> None:
        """Forget why an earlier connection ended: another is made."""
        with self.changed:
            self.error = None

    def forget_unsecured(self) -> None:
        """Forget what a lost connection took and did not secure: it is its queue's again."""
        with self.changed:
            self.under_way = self._count()

    def _count(self) -> int:
        return sum(map(len, self._waiting))

    # -- the thread of the connection ----------------------------------------------------------

    def claim(self, available: int) -> int:
        """How many of ``available`` messages may be taken; these are under way from now on."""
        with self.changed:
            room = max(0, min(available, self.credit - self.under_way))
            self.under_way += room
        return room

    def unclaim(self, count: int) -> None:
        """Note that so many claimed messages were not taken."""
        with self.changed:
            self.under_way -= count

    @property
    def full(self) -> bool:
        """Whether nothing more may be taken now."""
        return self.under_way >= self.credit

    def add(self, loads: Iterable[list[Held] | Aside | None]) -> None:
        """Take in what may be relied on: a bundle's messages, or what was set aside."""
        with self.changed:
            for load in loads:
                if isinstance(load, Aside):
                    self._count_aside(load)
                elif load:  # else it was of another queue
                    self._waiting.append(load)
                    self.bundles += 1
            self.changed.notify()

    def _count_aside(self, aside: Aside) -> None:
        self.set_aside[aside.kind] += 1
        if self.set_aside.total() <= _LOGGED:
            log.error(
                "Message %s is a dead letter, unprocessed: %s.",
                aside.message_id,
                aside.reason,
                extra={"code": "set_aside"},
            )

    def fail(self, error: BroadwayError) -> None:
        """Note why nothing more comes; the first reason stands."""
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify()

    def notify(self) -> None:
        """Have the run's thread look again at what it waits for."""
        with self.changed:
            self.changed.notify()
