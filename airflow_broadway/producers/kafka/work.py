"""What is to be done with one generation, sorted by partition: from a settlement to decisions."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING

from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, Action
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import many
from airflow_broadway.producers.kafka.claims import Claim, Decision, Place
from airflow_broadway.producers.kafka.options import place_of
from airflow_broadway.producers.kafka.settling import Read, Rest, decided

if TYPE_CHECKING:
    from airflow_broadway.producers.kafka.options import KafkaOptions

#: Entries by partition and offset.
Sorted = dict[Place, dict[int, Entry]]


class Work:
    """What is to be done with one generation, sorted by partition.

    :param at_once: What callbacks settled immediately.
    """

    def __init__(
        self,
        producer: KafkaOptions,
        lease: Lease,
        settlement: Settlement,
        at_once: Mapping[Place, Mapping[int, Decision]],
        now: float,
    ) -> None:
        self._order = producer.order
        self._now = now
        self.generation = lease.generation
        self.settlement = settlement
        self._at_once = at_once
        self._stopped = bool(lease.state.get("stopped"))
        self.backfill = bool(lease.state.get("backfill"))
        #: Whether a backfill ended before its interval did.
        self.unread = bool(lease.state.get("unread"))
        self._read = read_of(lease)
        own = lease.state.get("own", {})
        #: Where it may hold something.
        self.places: list[Place] = (
            list(self._read)
            if self._stopped
            else [(topic, number) for topic, numbers in own.items() for number in numbers]
        )
        self.entries: Sorted = {}
        self._names: Sorted | None = None
        known = settlement.settled_now
        named = (settlement.expected or 0) + (0 if known is None else known.total)
        #: Messages that the source handed out.
        self._total = sum(each.messages or 0 for each in self._read.values())
        #: Whether manifest and lease name the same messages.
        self._agree = self._stopped and named == self._total
        action = settlement.rest.action
        self._rest = action if action in (Action.ACK, Action.RELEASE) else Action.RELEASE

    def read(self, place: Place, claim: Claim) -> Read:
        """Returns the range that was read; what a source did that was not stopped is not known."""
        if self._stopped:
            return self._read[place]
        return Read(claim.start, claim.end)

    def messages(self, place: Place) -> int:
        """Returns how many messages were handed out, without those settled immediately."""
        read = self._read.get(place)
        return max(0, (read.messages or 0 if read else 0) - len(self.at_once(place)))

    def at_once(self, place: Place) -> Mapping[int, Decision]:
        """Returns what callbacks settled immediately."""
        return self._at_once.get(place, {})

    def read_entries(self) -> None:
        """Reads which messages are settled one by one."""
        self.entries = sort(self.settlement.entries())
        if self.settlement.rest.action is not self._rest and self.settlement.everything is not None:
            for place, found in sort(self.settlement.everything()).items():
                named = self.entries.setdefault(place, {})
                for offset, entry in found.items():
                    named.setdefault(offset, entry._replace(verdict=self.settlement.rest))

    def names(self) -> Sorted | None:
        """Reads which messages the manifest names; ``None``: it is not known."""
        if self._names is None and self.settlement.everything is not None:
            self._names = sort(self.settlement.everything())
        return self._names

    def decided(
        self, place: Place, claim: Claim, failed: Iterable[int] = ()
    ) -> dict[int, Decision]:
        """Returns the decision on each message that has one of its own, or is named.

        :param failed: Offsets of messages of which no copy could be sent: they stay.
        """
        decisions = {
            offset: decision_of(entry, self._now)
            for offset, entry in self.entries.get(place, {}).items()
        }
        for offset in failed:
            decisions[offset] = decisions[offset]._replace(action=Action.LEAVE)
        stays = [*decisions.values(), *self.at_once(place).values()]
        if (
            self._rest is not Action.ACK
            or not self._agree
            or (self._order != "none" and any(each.action in COMES_AGAIN for each in stays))
        ):
            self.names()
        read, rest = self.read(place, claim), self.rest(place)
        return decided(read, decisions, self.at_once(place), rest, order=self._order)

    def moves(self, decision: Decision) -> bool:
        """Whether a message is sent to the retry topic."""
        return decision.action is Action.RETRY and self._order == "none" and not self.backfill

    def carried_out(
        self, made: Mapping[int, Decision], refused: Container[int]
    ) -> dict[int, Decision]:
        """Returns decisions on one partition after copies were sent.

        :param refused: Offsets of messages of which none could be sent: they stay.
        """
        found = dict(made)
        for offset, each in made.items():
            if offset in refused and each.action is Action.DEAD_LETTER:
                found[offset] = each._replace(action=Action.LEAVE)
            elif offset not in refused and self.moves(each):
                found[offset] = each._replace(moved=True)
        return found

    def rest(self, place: Place) -> Rest:
        """Returns the verdict on the other messages.

        :raises ProducerError: If it is not known which they are.
        """
        if self._names is not None:
            named = self._names.get(place, {})
            decisions = {o: decision_of(each, self._now) for o, each in named.items()}
            return Rest(self._rest, decisions, whole=self._agree)
        if self._rest is Action.ACK and not self._agree:
            raise ProducerError(
                f"generation {self.generation} read {many(self._total, 'message')} and its manifest"
                f" names {self.settlement.expected}: none was settled, and all come back when the"
                " lease lapses"
            )
        return Rest(self._rest)


def sort(entries: Iterable[Entry]) -> Sorted:
    """Sorts entries by the partition and offset where their messages were read.

    That of a message that came by the retry topic is in its receipt.
    """
    found: Sorted = {}
    for entry in entries:
        place = entry.receipt.partition("@")[2] or entry.message_id
        topic, partition, offset = place_of(place)
        found.setdefault((topic, partition), {})[offset] = entry
    return found


def decision_of(entry: Entry, now: float) -> Decision:
    """Returns the decision that an entry is."""
    verdict, group = entry.verdict, entry.receipt.partition("@")[0]
    return Decision(verdict.action, now + verdict.delay, entry.attempt, group, entry.message_id)


def read_of(lease: Lease) -> dict[Place, Read]:
    """Returns what a source has handed out, by its lease."""
    return {
        (topic, int(partition)): Read(start, end, messages, tuple((a, b) for a, b in left))
        for topic, partitions in lease.state.get("read", {}).items()
        for partition, (messages, start, end, left) in partitions.items()
    }
