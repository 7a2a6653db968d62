"""Carries out the verdicts of one lease.

In the ordinary case no bundle is read: the lease is held, every verdict is known, and every bundle
is in the lease queue.  Failures are published again from staging, the journal notes that all is
done, and deleting the lease queue acknowledges all bundles at once.

In every other case bundles are read, and compared with the manifest by message id.  None is
acknowledged before all that follows from it is confirmed and noted.  The queue is deleted only if
every bundle of the manifest was read.  A bundle may be out of sight, because another process
settles too, somebody emptied the queue, or clocks disagree: such a bundle stays as it is.

A kill between any two steps loses nothing.  Before the note, the bundles are still there, and
settling begins anew: what was published again may then exist twice, marked.  After the note, the
bundles have nothing left to handle, wherever they turn up.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, RELEASE, Action, Verdict
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.reports import report_of
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.get import Getter
from airflow_broadway.producers.rabbitmq.broker.topology import Topology
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.settle.outbox import Outbox, Turn, held_of, staged
from airflow_broadway.producers.rabbitmq.settle.reading import (
    BundlesRead,
    Verdicts,
    together,
    unreported,
)

__all__ = ["BUNDLES_TIMEOUT", "LeaseSettlement"]

log = logging.getLogger(__name__)

#: Seconds to wait for bundles that a process held which died just now: the broker brings them back.
BUNDLES_TIMEOUT = 3.0


class LeaseSettlement:
    """One settlement of a whole lease at work.

    :param queue: The lease queue.
    :param turn: See :class:`Outbox`.
    """

    def __init__(
        self,
        connection: ConnectionThread,
        topology: Topology,
        journal: QueueJournal,
        lease: Lease,
        queue: str,
        clock: Clock,
        turn: Callable[[], Turn],
    ) -> None:
        self._connection = connection
        self._topology = topology
        self._journal = journal
        self._lease = lease
        self._clock = clock
        self._queue = queue
        self._now = journal.now(lease.generation)
        self._turn = turn
        self._outbox = self._new_outbox()
        #: Bundles that the lease counts; ``None`` if there may be others.
        self._counted = None if lease.state.get("extra", 1) else lease.state.get("bundles")

    def _new_outbox(self) -> Outbox:
        limit = self._journal.limit()
        return Outbox(self._connection, self._topology, self._lease, self._clock, self._turn, limit)

    # -- with everything known -----------------------------------------------------------------

    def known(self, settlement: Settlement, depth: int) -> bool:
        """Whether the bundles need not be read: all are there, and staging has what it takes."""
        expected, messages = settlement.expected, self._lease.state.get("messages", -1)
        return (
            settlement.rest.action is Action.ACK
            and expected is not None
            and expected in (messages, messages - len(self._now))
            and depth == self._counted
            and all(
                entry.verdict.action is Action.ACK or staged(entry)
                for entry in settlement.entries()
            )
        )

    def by_staging(self, settlement: Settlement) -> SettleReport | None:
        """Settle without reading bundles; ``None`` if the lease ended meanwhile."""
        named: dict[str, Action] = {}
        actions = self._publish_entries(settlement.entries(), named)
        failed = self._finish(actions, named)
        messages = self._lease.state["messages"] - len(self._now)
        actions[Action.ACK] += messages - failed - actions.total()
        if self._clock.now() >= self._lease.deadline:
            self._outbox = self._new_outbox()  # what it publishes is a repetition from now on
            return None
        report = report_of(actions, failed=failed, errors=self._outbox.guard.errors())
        report += unreported(self._now, settlement)
        report = replace(report, again=_but_acked(named, self._now))
        return self._end(report, None, {}, depth=self._counted or 0)

    def without_bundles(self, settlement: Settlement) -> SettleReport:
        """Settle although somebody deleted the lease queue: staging still has every message."""
        done: dict[str, Action] = {}
        actions = self._publish_entries(settlement.entries(), done)
        rest = settlement.rest
        lost = sum(1 for entry in settlement.entries() if not self._can(entry))
        if rest.action is not Action.ACK:
            named = {entry.message_id for entry in settlement.entries()}
            everything = settlement.everything() if settlement.everything else iter(())
            others = [e._replace(verdict=rest) for e in everything if e.message_id not in named]
            lost += sum(1 for entry in others if not self._can(entry))
            actions += self._publish_entries(iter(others), done)
        failed = self._finish(actions, done)
        if rest.action is Action.ACK:
            actions[Action.ACK] += self._others(settlement) - failed - lost - actions.total()
        note = f"the lease queue {self._queue!r} was deleted: settled from staging"
        errors = (*self._outbox.guard.errors(), note)
        report = report_of(actions, lapsed=lost, failed=failed, errors=errors)
        report += unreported(self._now, settlement)
        if rest.action is Action.ACK:
            left = {e.message_id: Action.RELEASE for e in settlement.entries() if not self._can(e)}
            again = _but_acked(done | left, self._now)
        else:
            again = ComingAgain.of(self._now | done, whole=False)
        report = replace(report, again=again)
        self._journal.note_settled(self._lease.generation, report, None)
        return report

    def _others(self, settlement: Settlement) -> int:
        """How many messages of the manifest were not settled at once."""
        expected = settlement.expected or 0
        if settlement.settled_now is not None:
            return max(0, expected - unreported(self._now, settlement).total)
        # Whether the manifest counts those is told by the lease alone.
        counts_all = expected == self._lease.state.get("messages")
        return expected - len(self._now) if counts_all else expected

    def _publish_entries(
        self, entries: Iterator[Entry], done: dict[str, Action]
    ) -> Counter[Action]:
        """Publish what follows from verdicts; into ``done`` what is done with each message."""
        actions: Counter[Action] = Counter()
        for entry in entries:
            if entry.message_id in self._now or not self._can(entry):
                continue
            action = entry.verdict.action
            actions[action] += 1
            done[entry.message_id] = action
            if action is not Action.ACK:
                self._outbox.carry_out(held_of(entry), entry.verdict)
        return actions

    @staticmethod
    def _can(entry: Entry) -> bool:
        """Whether a verdict can be carried out without the message's bundle."""
        return entry.verdict.action is Action.ACK or staged(entry)

    def _finish(self, actions: Counter[Action], done: dict[str, Action]) -> int:
        """Wait for all confirms; how many messages failed, which count for no action then."""
        failed = self._outbox.finish()
        actions.subtract(failed.values())
        done.update(dict.fromkeys(failed, Action.RELEASE))
        return len(failed)

    # -- by bundles ----------------------------------------------------------------------------

    def by_bundles(self, settlement: Settlement, *, held: bool) -> SettleReport:
        """Settle what the lease queue still has.

        :param held: Whether the lease is far from its end: then no bundle has lapsed out of the
            lease queue, and if there is a manifest, none is on its way into it.
        """
        published = settlement.expected is not None
        self._outbox.ensure_returns()
        if not published:
            self._topology.leases.fence(self._connection, self._queue)
        getter = Getter(self._connection, self._queue)
        read = self._settle_bundles(settlement, getter, held=held)
        other = self._journal.settled(self._lease.generation)  # by another, meanwhile
        unseen: dict[str, Action] = {}
        if published and held and other is None:
            unseen = self._settle_unseen(settlement, read)
        for key in self._outbox.finish():
            if unseen.pop(key, None) is None:
                read.fail(key)
        if other is None:
            report = self._report(settlement, read, unseen, held=held)
            bundles_done: Collection[str] | None = list(read.bundles)
        else:
            report, bundles_done = together(other, read)
            done = other.details["messages"]
            unseen = {key: Action(action) for key, action in done.items()}
        self._end(report, bundles_done, unseen)
        getter.ack()
        getter.close()
        if published and held and not read.errors and self._is_all(bundles_done):
            report = self._end(report, bundles_done, unseen, depth=0)
        return report

    def _settle_bundles(self, settlement: Settlement, getter: Getter, *, held: bool) -> BundlesRead:
        """Read every bundle there is, and publish what follows from the verdicts."""
        verdicts = Verdicts(settlement)
        read = BundlesRead(verdicts.named)
        for tag, body in self._bundles(getter, held):
            header, messages = read.unpack(body, self._journal)
            if header is None:
                continue
            getter.keep(tag)
            released = []
            for message in messages:
                verdict = self._verdict(message, header.bundle, verdicts, read)
                if verdict is None or verdict.action is Action.ACK:
                    continue
                if verdict.action is Action.RELEASE:
                    released.append(message)
                else:
                    self._outbox.carry_out(message, verdict)
            if released:
                self._outbox.release(header, released)
        return read

    def _verdict(
        self, message: Held, bundle: str, verdicts: Verdicts, read: BundlesRead
    ) -> Verdict | None:
        """What is to be done with a message; ``None`` if it was done with before."""
        key = message.message_id
        if key in self._now or (verdicts.published and read.repeats(message)):
            return None
        if verdicts.published and (key in read.became or not verdicts.names(key)):
            return RELEASE  # received, and in no manifest
        verdict = verdicts.of(key)
        read.note(bundle, message, verdict.action)
        return verdict

    def _is_all(self, bundles_done: Collection[str] | None) -> bool:
        return bundles_done is None or len(bundles_done) == self._counted

    def _bundles(self, getter: Getter, held: bool) -> Iterator[tuple[int, bytes]]:
        """Every bundle of the lease queue, one at a time, unacknowledged.

        Waits a little for those that a process held that has just died.
        """
        wanted = int(self._lease.state.get("bundles", 0)) if held else 0
        count, end = 0, time.monotonic() + BUNDLES_TIMEOUT
        while True:
            got = getter.get()
            if got is not None:
                count += 1
                yield got
            elif count >= wanted or time.monotonic() > end:
                return
            else:
                time.sleep(0.1)

    def _settle_unseen(self, settlement: Settlement, read: BundlesRead) -> dict[str, Action]:
        """Carry out from staging what was decided on messages whose bundles are not there.

        The journal notes them one by one: should their bundles come back, they are done with.
        """
        done: dict[str, Action] = {}
        if len(read.became) >= self._others(settlement):
            return done

        def carry_out(entry: Entry) -> None:
            action, key = entry.verdict.action, entry.message_id
            if action is Action.RELEASE or not self._can(entry):
                return  # it comes back with its bundle
            if key in self._now or key in read.became or key in done:
                return
            done[key] = action
            if action is not Action.ACK:
                self._outbox.carry_out(held_of(entry), entry.verdict, again=True)

        for entry in settlement.entries():
            carry_out(entry)
        if settlement.everything is not None and settlement.rest.action is not Action.RELEASE:
            for entry in settlement.everything():
                if entry.message_id not in read.named:
                    carry_out(entry._replace(verdict=settlement.rest))
        return done

    def _report(
        self, settlement: Settlement, read: BundlesRead, unseen: Mapping[str, Action], *, held: bool
    ) -> SettleReport:
        """The report of what was read, and of what was not there."""
        actions = read.actions + Counter(unseen.values())
        failed = len(self._outbox.guard.refused)
        lapsed = 0
        if settlement.expected is not None:
            short = self._others(settlement) - sum(actions.values()) - failed
            lapsed = max(0, short)
            # What is in no manifest is given back as well, and in nobody's account: of a bundle
            # whose confirm never came its messages were received again.
            actions[Action.RELEASE] -= min(max(0, -short), actions[Action.RELEASE])
        errors = [*read.errors, *self._outbox.guard.errors()]
        counted = self._lease.state.get("bundles", 0)
        if held and settlement.expected is not None and (lapsed or unseen):
            missing = max(0, counted - len(read.bundles))
            errors.append(
                f"{missing:,} of {many(counted, 'bundle')} {'was' if missing == 1 else 'were'} not"
                f" in the lease queue {self._queue!r}: another process has what is missing in hand,"
                f" it has lapsed, or somebody emptied it; of its messages {len(unseen):,} settled"
                f" from staging, and {lapsed:,} to come back with it"
            )
        report = report_of(actions, lapsed=lapsed, failed=failed, errors=errors)
        done = {**self._now, **unseen, **read.became, **dict.fromkeys(read.failed, Action.RELEASE)}
        whole = settlement.expected is not None and not lapsed
        report = replace(report, again=ComingAgain.of(done, whole=whole))
        return report + unreported(self._now, settlement)

    # -- the end -------------------------------------------------------------------------------

    def _end(
        self,
        report: SettleReport,
        bundles_done: Collection[str] | None,
        messages: Mapping[str, Action],
        *,
        depth: int | None = None,
    ) -> SettleReport:
        """Note what was done, and delete the lease queue.

        :param depth: How many bundles the queue is to hold now; ``None``: it is not to be deleted.
        """
        note = self._journal.note_settled
        generation = self._lease.generation
        note(generation, report, bundles_done, messages=messages)
        if depth is None:
            return report
        deleted = self._topology.leases.delete(self._connection, self._queue)
        if deleted != depth:
            error = (
                f"the lease queue {self._queue!r} held {many(deleted, 'bundle')} when it was"
                f" deleted, and {depth} were to be there: another process settled the same, or"
                " published to it"
            )
            log.error("%s", error, extra={"code": "lease_queue_count"})
            report += SettleReport(errors=(error,))
            note(generation, report, bundles_done, messages=messages)
        return report


def _but_acked(named: Mapping[str, Action], now: Mapping[str, Action]) -> ComingAgain:
    """What comes again where all others are acknowledged."""
    done = {**named, **now}
    return ComingAgain(frozenset(key for key, each in done.items() if each in COMES_AGAIN))
