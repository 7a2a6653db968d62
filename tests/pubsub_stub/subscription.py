"""One subscription's messages: which are ready, in flight, put off, and in which order."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["INVALID", "UNORDERED", "Held", "Subscription"]

INVALID = "PERMANENT_FAILURE_INVALID_ACK_ID"
#: Of an ordering key, an earlier message is not acknowledged yet.
UNORDERED = "TRANSIENT_FAILURE_UNORDERED_ACK_ID"
#: Bytes of messages in one answer.
_MOST_BYTES = 10_000_000


class Held:
    """One message of one subscription, until it is acknowledged."""

    __slots__ = ("ack_id", "acked", "attempts", "message", "place", "size", "until")

    def __init__(self, place: int, message: Any) -> None:
        self.place = place
        self.message = message
        self.size = message.ByteSize()
        #: The newest delivery's, while that is in flight.
        self.ack_id = ""
        #: Acknowledged, but an earlier one of its key is not: it may come again.
        self.acked = False
        self.attempts = 0
        self.until = 0.0


class Subscription:
    """The messages of a subscription, by the settings of its protobuf.

    :param numbers: Of its acknowledgement ids: none is given twice.
    """

    def __init__(self, settings: Any, numbers: Iterator[int]) -> None:
        self.settings = settings
        self._numbers = numbers
        self.name: str = settings.name
        #: By place: what is neither acknowledged nor dead.
        self.left: dict[int, Held] = {}
        #: By the newest delivery's id: what is in flight.
        self.flying: dict[str, Held] = {}
        #: Ids of deliveries that are over, where somebody acknowledges late, to the message.
        self.stale: dict[str, Held] = {}
        self.acked: set[str] = set()
        #: What is dead by the subscription's own policy, for the topic that takes it.
        self.dead: deque[Held] = deque()
        self._ready: deque[Held] = deque()
        self._lapses: list[tuple[float, int, Held]] = []
        self._later: list[tuple[float, int, Held]] = []
        #: Of ordered delivery: a key's messages that are left, oldest first; until when it waits.
        self._lanes: dict[str, deque[Held]] = {}
        self._waits: dict[str, float] = {}

    @property
    def ordered(self) -> bool:
        return bool(self.settings.enable_message_ordering)

    @property
    def exactly_once(self) -> bool:
        return bool(self.settings.enable_exactly_once_delivery)

    # -- in and out ----------------------------------------------------------------------------

    def put(self, place: int, message: Any) -> None:
        """A message is published."""
        held = Held(place, message)
        self.left[place] = held
        if self.ordered and message.ordering_key:
            self._lanes.setdefault(message.ordering_key, deque()).append(held)
        else:
            self._ready.append(held)

    def take(self, most: int, now: float) -> list[Held]:
        """What can be delivered now, with a fresh id each."""
        self.wake(now)
        found: list[Held] = []
        size = 0
        for held in self._deliverable(now):
            if len(found) == most or (found and size + held.size > _MOST_BYTES):
                break
            found.append(held)
            size += held.size
        for held in found:
            self._deliver(held, now)
        return found

    def _deliverable(self, now: float) -> Iterator[Held]:
        for key, lane in self._lanes.items():
            # While one of a key is in flight, no other one is delivered.
            if self._waits.get(key, 0.0) <= now and not any(held.ack_id for held in lane):
                yield from lane
        yield from self._ready

    def _deliver(self, held: Held, now: float) -> None:
        if self._ready and held is self._ready[0]:
            self._ready.popleft()
        held.ack_id = f"{self.name}:{next(self._numbers)}"
        held.attempts += 1
        self.flying[held.ack_id] = held
        self.hide(held, now + self.settings.ack_deadline_seconds)

    def hide(self, held: Held, until: float) -> None:
        """Keep one in flight until then."""
        held.until = until
        heapq.heappush(self._lapses, (until, next(self._numbers), held))

    def wake(self, now: float) -> None:
        """Let what lapsed, and what waited long enough, be delivered again."""
        while self._lapses and self._lapses[0][0] <= now:
            until, _, held = heapq.heappop(self._lapses)
            if held.ack_id and held.until == until:
                self.give_back(held, now)
        while self._later and self._later[0][0] <= now:
            self._ready.append(heapq.heappop(self._later)[2])

    # -- how a delivery ends -------------------------------------------------------------------

    def acknowledge(self, held: Held) -> None:
        """End a message for good; an ordered one once those before it have ended."""
        self.acked.add(held.ack_id)
        if not self.ordered or not held.message.ordering_key:
            self._end(held)
            return
        held.acked = True
        lane = self._lanes[held.message.ordering_key]
        while lane and lane[0].acked:
            self._end(lane.popleft())
        if not lane:
            del self._lanes[held.message.ordering_key]

    def _end(self, held: Held) -> None:
        self.flying.pop(held.ack_id, None)
        held.ack_id = ""
        del self.left[held.place]

    def earlier_is_open(self, held: Held) -> bool:
        """Whether an earlier message of its key has not been acknowledged."""
        lane = self._lanes.get(held.message.ordering_key) if self.ordered else None
        return bool(lane) and lane[0] is not held and not self._acked_before(lane, held)  # type: ignore[index, arg-type]

    @staticmethod
    def _acked_before(lane: Iterable[Held], held: Held) -> bool:
        return all(each.acked for each in itertools.takewhile(lambda each: each is not held, lane))

    def give_back(self, held: Held, now: float) -> None:
        """A delivery is over without an acknowledgement: by a nack, or since its time is up."""
        if not (self.ordered and held.message.ordering_key):
            self._over(held)
            if not self._is_dead(held):
                self._put_off(held, now)
            return
        # Those behind it in its key come again too, acknowledged or not.
        lane = self._lanes[held.message.ordering_key]
        self._waits[held.message.ordering_key] = now + self._backoff(held)
        for each in lane:
            if each.place >= held.place and (each.ack_id or each.acked):
                self._over(each)
        if self._is_dead(held):
            lane.remove(held)

    def _over(self, held: Held) -> None:
        if held.ack_id:
            self.flying.pop(held.ack_id, None)
            self.stale[held.ack_id] = held
        held.ack_id, held.acked = "", False

    def _put_off(self, held: Held, now: float) -> None:
        wait = self._backoff(held)
        if wait:
            heapq.heappush(self._later, (now + wait, next(self._numbers), held))
        else:
            self._ready.append(held)

    def _backoff(self, held: Held) -> float:
        if not self.settings.HasField("retry_policy"):
            return 0.0
        policy = self.settings.retry_policy
        least = policy.minimum_backoff.seconds + policy.minimum_backoff.nanos / 1e9
        most = policy.maximum_backoff.seconds + policy.maximum_backoff.nanos / 1e9
        return float(min(least * 2 ** (held.attempts - 1), most))

    def _is_dead(self, held: Held) -> bool:
        policy = self.settings.dead_letter_policy
        if not policy.dead_letter_topic or held.attempts < policy.max_delivery_attempts:
            return False
        del self.left[held.place]
        self.dead.append(held)
        return True
