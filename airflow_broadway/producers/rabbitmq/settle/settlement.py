"""Carries out the verdicts of one generation, on its claimed and fenced holding queue.

In the ordinary case no bundle is read: every verdict is known, and the queue holds as many bundles
as the manifest counts.  Failures are published again from staging, the journal notes that all is
done, and a purge acknowledges all bundles together.  Where the counts differ, or not all is known,
bundles are read, and each is acknowledged after what follows from it is confirmed and noted.

A kill between any two steps loses nothing.  Before the note the bundles are still there, and
settling begins again: what was published may then exist twice, marked.  After the note the bundles
that it covers have nothing left to handle.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, RELEASE, Action, Verdict
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.generation_log import Settled
from airflow_broadway.producers.kit.reports import beyond, report_of
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered
from airflow_broadway.producers.rabbitmq.broker.holding_queues import HoldingQueue
from airflow_broadway.producers.rabbitmq.bundle import BundleError, Held
from airflow_broadway.producers.rabbitmq.journal import QueueJournal, is_swept
from airflow_broadway.producers.rabbitmq.settle.outbox import Outbox, held_of, staged

log = logging.getLogger(__name__)

#: Seconds for the broker's counts to be those of the manifest.
COUNT_TIMEOUT = 3.0


def unreported(now: Mapping[str, Action], settlement: Settlement) -> SettleReport:
    """What was settled immediately, beyond what the settlement knows of.

    :param now: The messages that were settled immediately: message id → action.
    """
    return beyond(report_of(now.values()), settlement)


class LeaseSettlement:
    """One settlement of a generation.

    :param outbox: Publishes what follows from the verdicts.
    """

    def __init__(self, journal: QueueJournal, lease: Lease, outbox: Outbox) -> None:
        self._journal = journal
        self._lease = lease
        self._outbox = outbox
        self._now = journal.now(lease.generation)
        # Bundles that the lease counts; ``None`` if there may be others.
        self._counted = None if lease.state.get("extra", 1) else lease.state.get("bundles")

    def run(self, queue: HoldingQueue, settlement: Settlement) -> SettleReport | None:
        """Settle what the holding queue holds; ``None`` if the generation was swept meanwhile."""
        queue.fence(self._lease.generation)
        if self._is_known(settlement) and queue.count(self._counted, COUNT_TIMEOUT) == (
            self._counted
        ):
            return self._by_staging(queue, settlement)
        return self._by_bundles(queue, settlement)

    # -- with everything known -----------------------------------------------------------------

    def _is_known(self, settlement: Settlement) -> bool:
        """Whether the bundles need not be read: staging has what it takes."""
        expected, messages = settlement.expected, self._lease.state.get("messages", -1)
        return (
            settlement.rest.action is Action.ACK
            and expected is not None
            and self._counted is not None
            and expected in (messages, messages - len(self._now))
            and all(
                entry.verdict.action is Action.ACK or staged(entry)
                for entry in settlement.entries()
            )
        )

    def _by_staging(self, queue: HoldingQueue, settlement: Settlement) -> SettleReport | None:
        """Settles without reading bundles."""
        messages = self._lease.state["messages"] - len(self._now)
        report = self._publish_staged(settlement, messages)
        noted = self._journal.note_settled(self._lease.generation, report, None)
        if is_swept(noted):
            return None
        # Counts lag: what was put back is not to be purged with the rest.
        counted = None if self._outbox.remainders else self._counted
        return empty(queue, self._journal, self._lease.generation, noted, counted)

    def without_bundles(self, settlement: Settlement, name: str) -> SettleReport:
        """Settles although the bundles were removed by hand: staging still has every message."""
        note = f"the holding queue {name!r} was emptied or deleted by hand: settled from staging"
        report = self._publish_staged(settlement, self._others(settlement), note)
        return self._journal.note_settled(self._lease.generation, report, None).report

    def _publish_staged(self, settlement: Settlement, messages: int, *errors: str) -> SettleReport:
        """Carries out all verdicts by what staging has; a message that it lacks has lapsed.

        :param messages: How many there are that were not settled immediately.
        """
        done: dict[str, Action] = {}
        lost: set[str] = set()
        self._publish(settlement.entries(), done, lost)
        acks = settlement.rest.action is Action.ACK
        if not acks and settlement.everything is not None:
            others = (e._replace(verdict=settlement.rest) for e in settlement.everything())
            self._publish(others, done, lost)
        failed = self._outbox.finish()
        actions = Counter(action for key, action in done.items() if key not in failed)
        if acks:
            actions[Action.ACK] += messages - len(failed) - len(lost) - actions.total()
        errors = (*self._outbox.guard.errors(), *errors)
        report = report_of(actions, lapsed=len(lost), failed=len(failed), errors=errors)
        report += unreported(self._now, settlement)
        done |= dict.fromkeys(failed, Action.RELEASE)
        if acks:
            final = {**done, **dict.fromkeys(lost, Action.RELEASE), **self._now}
            again = ComingAgain(frozenset(key for key, a in final.items() if a in COMES_AGAIN))
        else:
            again = ComingAgain.of(self._now | done, whole=False)
        return replace(report, again=again)

    def _others(self, settlement: Settlement) -> int:
        """How many messages of the manifest were not settled immediately."""
        expected = settlement.expected or 0
        if settlement.settled_now is not None:
            return max(0, expected - unreported(self._now, settlement).total)
        # Whether the manifest counts those is told by the lease alone.
        counts_all = expected == self._lease.state.get("messages")
        return expected - len(self._now) if counts_all else expected

    def _publish(
        self,
        entries: Iterator[Entry],
        done: dict[str, Action],
        lost: set[str],
        *,
        repeated: bool = False,
    ) -> None:
        """Publishes what follows from verdicts.

        :param done: Filled with what was done with each message.
        :param lost: Filled with the messages of which staging has not what it takes.
        """
        for entry in entries:
            key, action = entry.message_id, entry.verdict.action
            if key in self._now or key in done or key in lost:
                continue
            if not _has_all(entry):
                lost.add(key)
                continue
            if action is not Action.ACK:
                action = self._outbox.carry_out(held_of(entry), entry.verdict, repeated=repeated)
            done[key] = action

    # -- by bundles ----------------------------------------------------------------------------

    def _by_bundles(self, queue: HoldingQueue, settlement: Settlement) -> SettleReport | None:
        """Settle what the holding queue still has."""
        read = _Read(settlement, self._now)
        for delivered in queue.bundles(self._lease.state.get("bundles"), COUNT_TIMEOUT):
            self._settle_bundle(queue, delivered, read)
        unseen: dict[str, Action] = {}
        if settlement.expected is not None and len(read.became) < self._others(settlement):
            self._publish(self._unseen(settlement, read), unseen, set(), repeated=True)
        for key in self._outbox.finish():
            unseen.pop(key, None)
            read.fail(key)
        report = self._report(queue, settlement, read, unseen)
        noted = self._journal.note_settled(self._lease.generation, report, read.bundles)
        if is_swept(noted):
            return None
        queue.free()
        return noted.report

    def _settle_bundle(self, queue: HoldingQueue, delivered: Delivered, read: _Read) -> None:
        try:
            header, messages = bundles.unpack(delivered.body)
        except BundleError as error:  # it stays where it is
            read.errors.append(str(error))
            return
        if header.generation != self._lease.generation:
            return  # a sweep judges it by its own journal
        if header.remainder:
            # That of an earlier try, whose bundles are still here; this try's own stays.
            if header.bundle not in self._outbox.remainders:
                queue.getter.keep(delivered.tag)
            return
        queue.getter.keep(delivered.tag)
        read.bundles.append(header.bundle)
        for message in messages:
            verdict = read.verdict(message)
            if verdict is not None:
                action = verdict.action
                if action is not Action.ACK:
                    action = self._outbox.carry_out(message, verdict)
                read.note(message, action)

    def _unseen(self, settlement: Settlement, read: _Read) -> Iterator[Entry]:
        """The decided messages whose bundles were removed by hand."""
        for entry in settlement.entries():
            if entry.message_id not in read.became and entry.verdict.action is not Action.RELEASE:
                yield entry
        if settlement.everything is not None and settlement.rest.action is not Action.RELEASE:
            for entry in settlement.everything():
                if entry.message_id not in read.became and entry.message_id not in read.named:
                    yield entry._replace(verdict=settlement.rest)

    def _report(
        self,
        queue: HoldingQueue,
        settlement: Settlement,
        read: _Read,
        unseen: Mapping[str, Action],
    ) -> SettleReport:
        """The report of what was read, and of what was not there."""
        actions = read.actions + Counter(unseen.values())
        failed = len(self._outbox.guard.refused)
        lapsed = 0
        if settlement.expected is not None:
            short = self._others(settlement) - sum(actions.values()) - failed
            lapsed = max(0, short)
            # What is in no manifest is released as well, and in no account: of a bundle whose
            # confirm never came its messages were received again.
            actions[Action.RELEASE] -= min(max(0, -short), actions[Action.RELEASE])
        errors = [*read.errors, *self._outbox.guard.errors()]
        counted = self._lease.state.get("bundles", 0)
        if settlement.expected is not None and (lapsed or unseen):
            missing = max(0, counted - len(read.bundles))
            errors.append(
                f"{missing:,} of {many(counted, 'bundle')} {'was' if missing == 1 else 'were'} not"
                f" in the holding queue {queue.name!r}: removed by hand; of the messages"
                f" {len(unseen):,} settled from staging, and {lapsed:,} lost there"
            )
        report = report_of(actions, lapsed=lapsed, failed=failed, errors=errors)
        done = {**self._now, **unseen, **read.became, **dict.fromkeys(read.failed, Action.RELEASE)}
        whole = settlement.expected is not None and not lapsed
        report = replace(report, again=ComingAgain.of(done, whole=whole))
        return report + unreported(self._now, settlement)


class _Read:
    """What one settlement reads of a holding queue, and what becomes of it.

    :param now: The messages that were settled immediately.
    """

    def __init__(self, settlement: Settlement, now: Mapping[str, Action]) -> None:
        self.named = {entry.message_id: entry.verdict for entry in settlement.entries()}
        #: The names of the bundles.
        self.bundles: list[str] = []
        #: Message id → what was done with it.
        self.became: dict[str, Action] = {}
        self.failed: set[str] = set()
        self.errors: list[str] = []
        self._now = now
        self._rest = settlement.rest
        self._published = settlement.expected is not None
        # The messages of the manifest, where the queue may hold others.
        self._manifest: set[str] | None = None
        if settlement.rest.action is not Action.RELEASE and settlement.everything is not None:
            self._manifest = {entry.message_id for entry in settlement.everything()}
        self._hashes: dict[str, int] = {}
        self._more: Counter[Action] = Counter()

    def verdict(self, message: Held) -> Verdict | None:
        """What is to be done with a message; ``None`` if it was done before."""
        key = message.message_id
        if key in self._now:
            return None
        if not self._published:
            return self.named.get(key, self._rest)
        if self._hashes.get(key) == _hash_of(message):
            return None
        listed = self._manifest is None or key in self._manifest or key in self.named
        if key in self.became or not listed:
            return RELEASE  # received, and in no manifest
        return self.named.get(key, self._rest)

    def note(self, message: Held, action: Action) -> None:
        """Note what is done with a message."""
        key = message.message_id
        if key in self.became:  # of a generation without a manifest: all of it is released
            self._more[action] += 1
            return
        self.became[key] = action
        self._hashes[key] = _hash_of(message)

    def fail(self, message_id: str) -> None:
        """Note that what was to be done with a message was not."""
        if self.became.pop(message_id, None) is not None:
            self.failed.add(message_id)

    @property
    def actions(self) -> Counter[Action]:
        """How many messages were done with in which way."""
        return Counter(self.became.values()) + self._more


def empty(
    queue: HoldingQueue,
    journal: QueueJournal,
    generation: str,
    noted: Settled,
    expected: int | None,
) -> SettleReport:
    """Remove the bundles that a noted settlement covers, and free the holding queue.

    :param expected: How many there are, where all are covered and that is known: these are purged.
    :returns: The report; with an error if other bundles came meanwhile.
    """
    report = noted.report
    if expected is not None and queue.count(None, 0.0) == expected:
        purged = queue.purge()
        if purged != expected:
            error = (
                f"the holding queue {queue.name!r} held {many(purged, 'bundle')} when it was"
                f" purged, and {expected} were to be there: another program published to it"
            )
            log.error("%s", error, extra={"code": "holding_queue_count"})
            report += SettleReport(errors=(error,))
            journal.note_settled(generation, report, None, replace=True)
    else:
        for delivered in queue.bundles(None, 0.0):
            try:
                header, _ = bundles.read_header(delivered.body)
            except BundleError as error:
                log.error("A message stays in %r: %s.", queue.name, error)
                continue
            if header.generation == generation and covers(noted, header):
                queue.getter.keep(delivered.tag)
    queue.free()
    return report


def covers(settled: Settled | None, header: bundles.Header) -> bool:
    """Whether a noted settlement has done all that follows from a bundle."""
    if settled is None or header.remainder:
        return False
    names = settled.details["bundles"]
    return names is None or header.bundle in names


def _has_all(entry: Entry) -> bool:
    """Whether a verdict can be carried out without the message's bundle."""
    return entry.verdict.action is Action.ACK or staged(entry)


def _hash_of(message: Held) -> int:
    return hash((message.attempt, message.route, message.properties, message.body))
