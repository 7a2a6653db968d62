"""Carries out the verdicts of one generation, on its claimed and fenced holding queue.

In the ordinary case no bundle is read: every verdict is known, and the queue holds as many bundles
as the manifest counts.  Failures are published again from staging, the journal notes that all is
done, and a purge acknowledges all bundles together.  Where the counts differ, or not all is known,
bundles are read, and each is acknowledged after what follows from it is confirmed and noted.

A kill between any two steps loses nothing.  Before the note the bundles are still there, and
settling begins again: what was published may then exist twice, marked.  After the note the bundles
that it covers have nothing left to handle.

A run begins with a sweep: it takes over holding queues whose generation is settled, or whose lease
has lapsed.  All that such a generation held and that needs handling goes back into the source
queue, marked, for the run that sweeps and for others.  Each bundle is acknowledged behind the
confirms of its messages, so a sweep that is killed is completed by the next.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, RELEASE, Action, Verdict
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.generation_log import Settled
from airflow_broadway.producers.kit.reports import beyond, report_of
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered
from airflow_broadway.producers.rabbitmq.broker.holding_queues import HoldingQueue
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.bundle import BundleError, Header, Held
from airflow_broadway.producers.rabbitmq.journal import QueueJournal, is_swept
from airflow_broadway.producers.rabbitmq.settle.outbox import Outbox, held_of, staged

log = logging.getLogger(__name__)

#: Seconds for the broker's counts to be those of the manifest.
COUNT_TIMEOUT = 3.0


def unheld_report(journal: QueueJournal, lease: Lease, settlement: Settlement) -> SettleReport:
    """Returns the report of a generation that holds nothing: what was settled immediately."""
    now = journal.log_of(lease.generation).now()
    again = ComingAgain.of(now, whole=not settlement.expected)
    return replace(beyond(report_of(now.values()), settlement), again=again)


class LeaseSettlement:
    """One settlement of a generation.

    :param outbox: Publishes what follows from the verdicts.
    """

    def __init__(
        self, journal: QueueJournal, lease: Lease, settlement: Settlement, outbox: Outbox
    ) -> None:
        self._journal = journal
        self._lease = lease
        self._settlement = settlement
        self._outbox = outbox
        self._now = journal.log_of(lease.generation).now()
        # What was settled immediately, beyond what the settlement knows of.
        self._unreported = beyond(report_of(self._now.values()), settlement)
        # Bundles that the lease counts; ``None`` if there may be others.
        self._counted = None if lease.state.get("extra", 1) else lease.state.get("bundles")

    def run(self, queue: HoldingQueue, now: datetime) -> SettleReport:
        """Settles what the claimed holding queue holds."""
        noted = self._journal.log_of(self._lease.generation).settled()
        if is_swept(noted):
            return self._lapsed_report()
        expects = self._lease.state.get("bundles") and noted is None
        owner = queue.owner(COUNT_TIMEOUT if expects else 0.0)
        own = owner is not None and owner.generation == self._lease.generation
        if noted is not None:
            if own:  # killed before the queue was emptied
                empty(queue, self._journal, self._lease.generation, noted, None)
            return noted.report
        if own:
            report = self._settle(queue)
            return self._lapsed_report() if report is None else report
        if now >= self._lease.deadline:
            return self._lapsed_report()
        if self._settlement.expected is None:
            return self._lost_report(queue.name) + self._unheld_report()
        if not self._settlement.expected:
            return self._unheld_report()
        note = f"the holding queue {queue.name!r} was emptied or deleted by hand"
        report = self._publish_staged(self._others(), f"{note}: settled from staging")
        return self._journal.note_settled(self._lease.generation, report, None).report

    def _settle(self, queue: HoldingQueue) -> SettleReport | None:
        """Settles its own queue; ``None`` if the generation was swept meanwhile."""
        queue.fence(self._lease.generation)
        if self._is_known() and queue.count(self._counted, COUNT_TIMEOUT) == self._counted:
            messages = self._lease.state["messages"] - len(self._now)
            report = self._publish_staged(messages)
            noted = self._journal.note_settled(self._lease.generation, report, None)
            if is_swept(noted):
                return None
            # Counts lag: what was put back is not to be purged with the rest.
            counted = None if self._outbox.remainders else self._counted
            return empty(queue, self._journal, self._lease.generation, noted, counted)
        report, covered = self._settle_bundles(queue)
        noted = self._journal.note_settled(self._lease.generation, report, covered)
        if is_swept(noted):
            return None
        queue.free()
        return noted.report

    # -- of a generation without bundles -------------------------------------------------------

    def _unheld_report(self) -> SettleReport:
        return unheld_report(self._journal, self._lease, self._settlement)

    def _lapsed_report(self) -> SettleReport:
        """The report of a generation whose messages another run has, or will have."""
        early = self._unheld_report()
        return SettleReport(lapsed=max(0, (self._settlement.expected or 0) - early.total)) + early

    def _lost_report(self, name: str) -> SettleReport:
        """The report of a generation that published no manifest, and whose bundles are gone."""
        if not self._lease.state.get("bundles"):  # as it was before the first message
            return SettleReport()
        count = int(self._lease.state.get("messages", 0)) - len(self._now)
        held = many(count, "message") if count > 0 else "all of it"
        error = (
            f"the holding queue {name!r} was emptied or deleted by hand before this run had"
            f" published its manifest: what it held is lost ({held}); holding queues are emptied"
            " by this package alone"
        )
        log.error("%s", error, extra={"code": "holding_queue_emptied"})
        return SettleReport(lapsed=max(0, count), errors=(error,))

    # -- by staging ----------------------------------------------------------------------------

    def _is_known(self) -> bool:
        """Whether the bundles need not be read: staging has what it takes."""
        expected, messages = self._settlement.expected, self._lease.state.get("messages", -1)
        return (
            self._settlement.rest.action is Action.ACK
            and expected is not None
            and self._counted is not None
            and expected in (messages, messages - len(self._now))
            and all(map(_has_all, self._settlement.entries()))
        )

    def _publish_staged(self, messages: int, *errors: str) -> SettleReport:
        """Carries out all verdicts by what staging has; a message that it lacks has lapsed.

        :param messages: How many there are that were not settled immediately.
        """
        settlement = self._settlement
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
        done |= dict.fromkeys(failed, Action.RELEASE)
        if acks:
            final = {**done, **dict.fromkeys(lost, Action.RELEASE), **self._now}
            again = ComingAgain(frozenset(key for key, a in final.items() if a in COMES_AGAIN))
        else:
            again = ComingAgain.of(self._now | done, whole=False)
        return replace(report + self._unreported, again=again)

    def _others(self) -> int:
        """How many messages of the manifest were not settled immediately."""
        expected = self._settlement.expected or 0
        if self._settlement.settled_now is not None:
            return max(0, expected - self._unreported.total)
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

    def _settle_bundles(self, queue: HoldingQueue) -> tuple[SettleReport, list[str]]:
        """Settles what the holding queue still has; returns the bundles that this covers, too."""
        read = _Read(self._settlement, self._now)
        for delivered in queue.bundles(self._lease.state.get("bundles"), COUNT_TIMEOUT):
            self._settle_bundle(queue, delivered, read)
        unseen: dict[str, Action] = {}
        if self._settlement.expected is not None and len(read.became) < self._others():
            self._publish(self._unseen(read), unseen, set(), repeated=True)
        for key in self._outbox.finish():
            unseen.pop(key, None)
            read.fail(key)
        return self._report(queue.name, read, unseen), read.bundles

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

    def _unseen(self, read: _Read) -> Iterator[Entry]:
        """The decided messages whose bundles were removed by hand."""
        settlement = self._settlement
        for entry in settlement.entries():
            if entry.message_id not in read.became and entry.verdict.action is not Action.RELEASE:
                yield entry
        if settlement.everything is not None and settlement.rest.action is not Action.RELEASE:
            for entry in settlement.everything():
                if entry.message_id not in read.became and entry.message_id not in read.named:
                    yield entry._replace(verdict=settlement.rest)

    def _report(self, name: str, read: _Read, unseen: Mapping[str, Action]) -> SettleReport:
        """The report of what was read, and of what was not there."""
        actions = read.actions + Counter(unseen.values())
        failed = len(self._outbox.guard.refused)
        published, lapsed = self._settlement.expected is not None, 0
        if published:
            short = self._others() - sum(actions.values()) - failed
            lapsed = max(0, short)
            # What is in no manifest is released as well, and in no account: of a bundle whose
            # confirm never came its messages were received again.
            actions[Action.RELEASE] -= min(max(0, -short), actions[Action.RELEASE])
        errors = [*read.errors, *self._outbox.guard.errors()]
        if published and (lapsed or unseen):
            counted = self._lease.state.get("bundles", 0)
            missing = max(0, counted - len(read.bundles))
            errors.append(
                f"{missing:,} of {many(counted, 'bundle')} {'was' if missing == 1 else 'were'} not"
                f" in the holding queue {name!r}: removed by hand; of the messages"
                f" {len(unseen):,} settled from staging, and {lapsed:,} lost there"
            )
        report = report_of(actions, lapsed=lapsed, failed=failed, errors=errors)
        done = {**self._now, **unseen, **read.became, **dict.fromkeys(read.failed, Action.RELEASE)}
        again = ComingAgain.of(done, whole=published and not lapsed)
        return replace(report, again=again) + self._unreported


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


def covers(settled: Settled | None, header: Header) -> bool:
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


# -- sweeps ---------------------------------------------------------------------------------------


def sweep(connection: ConnectionThread, queues: StandingQueues, env: ProducerEnv) -> None:
    """Looks at every holding queue.  Never in the way of a run: errors are logged."""
    try:
        for name, depth in queues.holding.present(connection):
            if env.stopping():
                return
            if not depth:
                continue
            with queues.holding.claim(connection, name) as queue:
                owner = None if queue is None else _lapsed_owner(queue, queues, env)
                if queue is not None and owner is not None:
                    _take_over(connection, queues, env, queue, owner)
        queues.journal.forget(env.clock.now())
    except (BroadwayError, OSError, ValueError) as error:
        log.warning("Holding queues of dead generations could not be swept: %s", error)


def _lapsed_owner(queue: HoldingQueue, queues: StandingQueues, env: ProducerEnv) -> Header | None:
    """Returns whose the queue is, if that generation is settled, or its lease has lapsed."""
    try:
        owner = queue.owner()
    except BundleError as error:
        text, code = "The holding queue %r is not used: %s.", {"code": "bundle_unreadable"}
        log.error(text, queue.name, error, extra=code)
        return None
    if owner is None or owner.until <= env.clock.now().timestamp():
        return owner
    return None if queues.journal.log_of(owner.generation).settled() is None else owner


def _take_over(
    connection: ConnectionThread,
    queues: StandingQueues,
    env: ProducerEnv,
    queue: HoldingQueue,
    owner: Header,
) -> None:
    journal, generation = queues.journal, owner.generation
    queue.fence(generation)
    journal.note_swept(generation)
    now = env.clock.now()
    outbox = Outbox(connection, queues, env.clock, generation, now, holding_queue=queue.name)
    released, unreadable = 0, []
    known: dict[str, tuple[Settled | None, Mapping[str, Action]]] = {}
    for delivered in queue.bundles(queue.count(None, 0.0), COUNT_TIMEOUT):
        try:
            header, messages = bundles.unpack(delivered.body)
        except BundleError as error:
            unreadable.append(str(error))
            continue
        if header.bundle in outbox.remainders:
            continue
        if header.generation not in known:
            known[header.generation] = (
                journal.log_of(header.generation).settled(),
                journal.log_of(header.generation).now(),
            )
        settled, done = known[header.generation]
        if not covers(settled, header):
            for message in messages:
                if message.message_id not in done:
                    outbox.carry_out(message._replace(redelivered=True), RELEASE)
                    released += 1
        queue.getter.keep(delivered.tag)
    released -= len(outbox.finish())
    queue.free()
    for text in (*outbox.guard.errors(), *dict.fromkeys(unreadable)):
        log.error("In the holding queue %r: %s.", queue.name, text)
    if released:
        log.warning(
            "Generation %s has ended and left %s in %r: released into the source queue.",
            generation,
            many(released, "message"),
            queue.name,
        )
