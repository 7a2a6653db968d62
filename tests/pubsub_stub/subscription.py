"""One subscription's messages: ready, in flight or delayed, in order."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["INVALID", "UNORDERED", "StoredMessage", "Subscription"]

INVALID = "PERMANENT_FAILURE_INVALID_ACK_ID"
#: Of an ordering key, an earlier message is not acknowledged yet.
UNORDERED = "TRANSIENT_FAILURE_UNORDERED_ACK_ID"
#: Bytes of messages in one answer.
_MOST_BYTES = 10_000_000


class StoredMessage:
    """One message of one subscription, until it is acknowledged."""

    __slots__ = ("ack_id", "acked", "attempts", "message", "place", "size", "until")

    def __init__(self, place: int, message: Any) -> None:
        self.place = place
        self.message = message
        self.size = message.ByteSize()
        #: The newest delivery's, while that is in flight.
        self.ack_id = ""
        #: Acknowledged before an earlier one of its key: it may be redelivered.
        self.acked = False
        self.attempts = 0
        self.until = 0.0


class Subscription:
    """The messages of a subscription, by the settings of its protobuf.

    :param numbers: Of its ack ids, which are unique.
    """

    def __init__(self, settings: Any, numbers: Iterator[int]) -> None:
        self.settings = settings
        self._numbers = numbers
        self.name: str = settings.name
        #: By place: messages neither acknowledged nor dead.
        self.left: dict[int, StoredMessage] = {}
        #: By the newest ack id: messages in flight.
        self.flying: dict[str, StoredMessage] = {}
        #: By expired ack ids: their messages, for late acknowledgements.
        self.stale: dict[str, StoredMessage] = {}
        self.acked: set[str] = set()
        #: Messages dead-lettered by the subscription's own policy.
        self.dead: deque[StoredMessage] = deque()
        self._ready: deque[StoredMessage] = deque()
        self._lapses: list[tuple[float, int, StoredMessage]] = []
        self._later: list[tuple[float, int, StoredMessage]] = []
        #: With ordering, by key: its messages, oldest first; the end of its backoff.
        self._lanes: dict[str, deque[StoredMessage]] = {}
        self._waits: dict[str, float] = {}

    @property
    def ordered(self) -> bool:
        return bool(self.settings.enable_message_ordering)

    @property
    def exactly_once(self) -> bool:
        return bool(self.settings.enable_exactly_once_delivery)

    # -- in and out ----------------------------------------------------------------------------

    def put(self, place: int, message: Any) -> None:
        """Adds a published message."""
        stored = StoredMessage(place, message)
        self.left[place] = stored
        if self.ordered and message.ordering_key:
            self._lanes.setdefault(message.ordering_key, deque()).append(stored)
        else:
            self._ready.append(stored)

    def take(self, most: int, now: float) -> list[StoredMessage]:
        """Delivers the available messages, each with a fresh id."""
        self.wake(now)
        found: list[StoredMessage] = []
        size = 0
        for stored in self._deliverable(now):
            if len(found) == most or (found and size + stored.size > _MOST_BYTES):
                break
            found.append(stored)
            size += stored.size
        for stored in found:
            self._deliver(stored, now)
        return found

    def _deliverable(self, now: float) -> Iterator[StoredMessage]:
        for key, lane in self._lanes.items():
            # One message of a key in flight blocks the others.
            if self._waits.get(key, 0.0) <= now and not any(stored.ack_id for stored in lane):
                yield from lane
        yield from self._ready

    def _deliver(self, stored: StoredMessage, now: float) -> None:
        if self._ready and stored is self._ready[0]:
            self._ready.popleft()
        stored.ack_id = f"{self.name}:{next(self._numbers)}"
        stored.attempts += 1
        self.flying[stored.ack_id] = stored
        self.hide(stored, now + self.settings.ack_deadline_seconds)

    def hide(self, stored: StoredMessage, until: float) -> None:
        """Keeps a message in flight until then."""
        stored.until = until
        heapq.heappush(self._lapses, (until, next(self._numbers), stored))

    def wake(self, now: float) -> None:
        """Makes lapsed and delayed messages available again."""
        while self._lapses and self._lapses[0][0] <= now:
            until, _, stored = heapq.heappop(self._lapses)
            if stored.ack_id and stored.until == until:
                self.release(stored, now)
        while self._later and self._later[0][0] <= now:
            self._ready.append(heapq.heappop(self._later)[2])

    # -- end of a delivery ---------------------------------------------------------------------

    def acknowledge(self, stored: StoredMessage) -> None:
        """Removes a message; an ordered one after those before it."""
        self.acked.add(stored.ack_id)
        if not self.ordered or not stored.message.ordering_key:
            self._end(stored)
            return
        stored.acked = True
        lane = self._lanes[stored.message.ordering_key]
        while lane and lane[0].acked:
            self._end(lane.popleft())
        if not lane:
            del self._lanes[stored.message.ordering_key]

    def _end(self, stored: StoredMessage) -> None:
        self.flying.pop(stored.ack_id, None)
        stored.ack_id = ""
        del self.left[stored.place]

    def earlier_is_open(self, stored: StoredMessage) -> bool:
        """Returns whether an earlier message of its key is unacknowledged."""
        lane = self._lanes.get(stored.message.ordering_key) if self.ordered else None
        return bool(lane) and lane[0] is not stored and not self._acked_before(lane, stored)  # type: ignore[index, arg-type]

    @staticmethod
    def _acked_before(lane: Iterable[StoredMessage], stored: StoredMessage) -> bool:
        return all(
            other.acked for other in itertools.takewhile(lambda other: other is not stored, lane)
        )

    def release(self, stored: StoredMessage, now: float) -> None:
        """Ends a delivery without acknowledgement, by a nack or a lapse."""
        if not (self.ordered and stored.message.ordering_key):
            self._end_delivery(stored)
            if not self._is_dead(stored):
                self._requeue(stored, now)
            return
        # Later messages of its key are redelivered too, acknowledged or not.
        lane = self._lanes[stored.message.ordering_key]
        self._waits[stored.message.ordering_key] = now + self._backoff(stored)
        for other in lane:
            if other.place >= stored.place and (other.ack_id or other.acked):
                self._end_delivery(other)
        if self._is_dead(stored):
            lane.remove(stored)

    def _end_delivery(self, stored: StoredMessage) -> None:
        if stored.ack_id:
            self.flying.pop(stored.ack_id, None)
            self.stale[stored.ack_id] = stored
        stored.ack_id, stored.acked = "", False

    def _requeue(self, stored: StoredMessage, now: float) -> None:
        wait = self._backoff(stored)
        if wait:
            heapq.heappush(self._later, (now + wait, next(self._numbers), stored))
        else:
            self._ready.append(stored)

    def _backoff(self, stored: StoredMessage) -> float:
        if not self.settings.HasField("retry_policy"):
            return 0.0
        policy = self.settings.retry_policy
        least = policy.minimum_backoff.seconds + policy.minimum_backoff.nanos / 1e9
        most = policy.maximum_backoff.seconds + policy.maximum_backoff.nanos / 1e9
        return float(min(least * 2 ** (stored.attempts - 1), most))

    def _is_dead(self, stored: StoredMessage) -> bool:
        policy = self.settings.dead_letter_policy
        if not policy.dead_letter_topic or stored.attempts < policy.max_delivery_attempts:
            return False
        del self.left[stored.place]
        self.dead.append(stored)
        return True
