"""What is to be done with one generation, sorted by partition: from a settlement to decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import ComingAgain
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, Action
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import many
from airflow_broadway.producers.kafka.client import Place
from airflow_broadway.producers.kafka.options import place_of
from airflow_broadway.producers.kafka.ranges import Ranges, count, minus
from airflow_broadway.producers.kafka.settling import Decision, Rest, final_of
from airflow_broadway.producers.kafka.table import Table

if TYPE_CHECKING:
    from airflow_broadway.producers.kafka.options import KafkaOptions
    from airflow_broadway.producers.kafka.register import Register

__all__ = ["Work", "coming_again", "decision_of", "read_of"]


class Work:
    """What is to be done with one generation, sorted by partition."""

    def __init__(
        self, producer: KafkaOptions, lease: Lease, settlement: Settlement, now: float
    ) -> None:
        self._producer = producer
        self._now = now
        self.generation = lease.generation
        self.settlement = settlement
        self.stopped = bool(lease.state.get("stopped"))
        self.backfill = bool(lease.state.get("backfill"))
        #: Whether a backfill ended before its interval did.
        self.unread = bool(lease.state.get("unread"))
        #: What was handed out, by the source's own account: messages and ranges.
        self.read = read_of(lease)
        own = lease.state.get("own", {})
        #: Where it may hold something.
        self.places: list[Place] = (
            list(self.read)
            if self.stopped
            else [(topic, number) for topic, numbers in own.items() for number in numbers]
        )
        self.entries: dict[Place, dict[int, Entry]] = {}
        self._names: dict[Place, dict[int, str]] | None = None
        known = settlement.settled_now
        named = (settlement.expected or 0) + (0 if known is None else known.total)
        #: Whether manifest and lease name the same messages.
        self._agree = self.stopped and named == sum(count for count, _ in self.read.values())
        action = settlement.rest.action
        self._rest = action if action in (Action.ACK, Action.RELEASE) else Action.RELEASE

    def messages(self, place: Place) -> int:
        """How many messages were handed out of a partition."""
        return self.read[place][0] if place in self.read else 0

    def read_entries(self) -> None:
        """Read which messages are settled one by one."""
        self._sort(self.settlement.entries(), self.entries)
        if self.settlement.rest.action is not self._rest and self.settlement.everything is not None:
            every: dict[Place, dict[int, Entry]] = {}
            self._sort(self.settlement.everything(), every)
            for place, found in every.items():
                named = self.entries.setdefault(place, {})
                for offset, entry in found.items():
                    named.setdefault(offset, entry._replace(verdict=self.settlement.rest))

    def _sort(self, entries: Iterable[Entry], into: dict[Place, dict[int, Entry]]) -> None:
        for entry in entries:
            topic, partition, offset = place_of(entry.message_id)
            into.setdefault((topic, partition), {})[offset] = entry

    def needs_names(self, place: Place, table: Table) -> bool:
        """Whether a partition cannot be settled by counts alone."""
        if self._names is not None or self.settlement.everything is None:
            return False
        if self._rest is not Action.ACK or not self._agree:
            return True
        if self._producer.order == "none":
            return False
        at_once = table.now.get(self.generation, {})
        return any(Action(name) in COMES_AGAIN for name in at_once) or any(
            each.verdict.action in COMES_AGAIN for each in self.entries.get(place, {}).values()
        )

    def read_names(self) -> None:
        """Read which messages the manifest names."""
        if self.settlement.everything is None:
            return
        names: dict[Place, dict[int, str]] = {}
        for entry in self.settlement.everything():
            topic, partition, offset = place_of(entry.message_id)
            names.setdefault((topic, partition), {})[offset] = entry.receipt
        self._names = names

    def decisions(self, place: Place) -> dict[int, Decision]:
        """The single decisions on messages of a partition."""
        return {
            offset: decision_of(entry, self._now)
            for offset, entry in self.entries.get(place, {}).items()
        }

    def rest(self, place: Place) -> Rest:
        """What becomes of the others."""
        count, ranges = self.read.get(place, (None, None))
        if self._names is not None:
            named = self._names.get(place, {})
            return Rest(self._rest, ranges, count, named, whole=self._agree)
        if self._rest is Action.ACK and not self._agree:
            raise ProducerError(
                f"generation {self.generation} read"
                f" {many(sum(n for n, _ in self.read.values()), 'message')} and its manifest names"
                f" {self.settlement.expected}: none was settled, and all come back when the lease"
                " lapses"
            )
        return Rest(self._rest, ranges, count)


def decision_of(entry: Entry, now: float) -> Decision:
    """What an entry says of its message."""
    verdict = entry.verdict
    return Decision(verdict.action, now + verdict.delay, entry.attempt, entry.receipt)


def read_of(lease: Lease) -> dict[Place, tuple[int, Ranges]]:
    """What a source has handed out, by its lease."""
    return {
        (topic, int(partition)): (count, tuple((low, high) for low, high in ranges))
        for topic, partitions in lease.state.get("read", {}).items()
        for partition, (count, ranges) in partitions.items()
    }


def coming_again(work: Work, register: Register) -> ComingAgain:
    """Which messages of a settled generation come again, by the tables as they are known here."""
    final: dict[Place, Ranges] = {}
    for place in work.places:
        table = register.known(place)
        if table is None:
            continue
        generation = work.generation
        if generation in table.final:
            final[place] = table.final[generation]
        elif generation in table.past:  # forgotten since: rather twice in an archive than not
            final[place] = work.read.get(place, (0, ()))[1]
        else:  # others have it
            final[place] = final_of(table.now.get(generation, {}))
    again = {place: minus(read, final.get(place, ())) for place, (_, read) in work.read.items()}
    if work.stopped and _size(again) <= _size(final):
        return ComingAgain(_ids(again))
    return ComingAgain(_ids(final), all_but=True)


def _size(places: Mapping[Place, Ranges]) -> int:
    return sum(map(count, places.values()))


def _ids(places: Mapping[Place, Ranges]) -> frozenset[str]:
    return frozenset(
        f"{topic}-{partition}-{offset}"
        for (topic, partition), ranges in places.items()
        for low, high in ranges
        for offset in range(low, high)
    )
