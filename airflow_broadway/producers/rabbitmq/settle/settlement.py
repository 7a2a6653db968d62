"""Carries out the verdicts of one generation, on its claimed and fenced holding queue.

In the ordinary case no bundle is read: every verdict is known, and the queue holds as many bundles
as the manifest counts.  Failures are published again from staging, the journal notes that all is
done, and a purge acknowledges all bundles together.  Where the counts differ, or not all is known,
bundles are read, and each is acknowledged after what follows from it is confirmed and noted.  The
bundle of a message that cannot be published stays, and the note says which messages those are.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from itertools import chain

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, RELEASE, Action, Verdict
from airflow_broadway.core.errors import BroadwayError, ProducerError
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.generation_log import GenerationLog, Settled
from airflow_broadway.producers.kit.guard import MessageGuard
from airflow_broadway.producers.kit.reports import beyond, report_of
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq import marks
from airflow_broadway.producers.rabbitmq.amqp.channels import Publisher
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.properties import staged_delivery
from airflow_broadway.producers.rabbitmq.broker.holding_queues import HoldingQueue, rung
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.bundle import BundleError, Header, Held
from airflow_broadway.producers.rabbitmq.journal import QueueJournal, is_swept

log = logging.getLogger(__name__)

#: A name for one settling of a generation, and whether it may publish what another did before.
Turn = tuple[str, bool]


def held_of(entry: Entry) -> Held | None:
    """A staged message as a bundle would hold it; ``None`` if staging lacks a part of it."""
    try:
        route, properties, redelivered = staged_delivery(entry.properties)
    except ProducerError:
        return None
    if entry.payload is None:
        return None
    return Held(entry.message_id, entry.attempt, redelivered, route, properties, entry.payload)


class Outbox:
    """What one settlement publishes.

    A message that cannot be published, or that the broker refuses, is counted as failed: its bundle
    is to stay in the holding queue.

    :param deadline: When the lease lapses.
    :param turn: Called before the first message is published; by default the journal notes that the
        whole generation is settled.
    """

    def __init__(
        self,
        connection: ConnectionThread,
        queues: StandingQueues,
        clock: Clock,
        generation: str,
        deadline: datetime,
        turn: Callable[[], Turn] | None = None,
    ) -> None:
        self.guard = MessageGuard()
        self._connection = connection
        self._queues = queues
        self._clock = clock
        self._generation = generation
        self._deadline = deadline
        self._next_turn = turn or (lambda: queues.journal.note_turn(generation, whole=True))
        self._turn: Turn | None = None
        self._publisher: Publisher | None = None

    def carry_out(self, held: Held, verdict: Verdict, *, repeated: bool = False) -> Action:
        """Publish what follows from a verdict other than ``ACK``; :meth:`finish` says what failed.

        :param repeated: Whether another settlement may publish the same: a dead letter says so.
        :returns: The action: a message without room for the mark of a retry is a dead letter.
        """
        action = verdict.action
        with self.guard.each(held.message_id):
            try:
                self._publish(held, verdict, repeated)
            except marks.TooLarge as error:
                if action is Action.DEAD_LETTER:
                    raise
                action = Action.DEAD_LETTER
                reason = f"it cannot be delivered again: {error}"
                self._publish(held, Verdict(action, 0.0, reason, "settle"), repeated)
        return action

    def _publish(self, held: Held, verdict: Verdict, repeated: bool) -> None:
        exchange, routing_key = self._place(held, verdict)
        self._queues.check_place(self._connection, exchange, routing_key)
        properties = self._properties(held, verdict, repeated)
        if len(routing_key.encode()) > 255:
            raise ProducerError(f"its routing key cannot be published again: {routing_key!r}")
        if self._publisher is None:
            self._publisher = Publisher(self._connection, marks.publication_key)
        self._publisher.publish(exchange, routing_key, properties, held.body, key=held.message_id)

    def _place(self, held: Held, verdict: Verdict) -> tuple[str, str]:
        """Exchange and routing key."""
        if verdict.action is Action.DEAD_LETTER:
            self._queues.ensure_dead(self._connection)
            return self._queues.dead_for(held.route)
        delay = verdict.delay if verdict.action is Action.RETRY else 0.0
        if verdict.action is Action.LEAVE:
            delay = (self._deadline - self._clock.now()).total_seconds()
        step = rung(delay)
        if step is None:
            return "", self._queues.names.source
        return "", self._queues.ensure_delay(self._connection, step)

    def _properties(self, held: Held, verdict: Verdict, repeated: bool) -> bytes:
        turn, repeats = self._turn = self._turn or self._next_turn()
        action, limit = verdict.action, self._connection.max_properties
        attempt = held.attempt + (1 if action is Action.RETRY else 0)
        mark = marks.Mark(held.message_id, self._generation, attempt, turn)
        if action is not Action.DEAD_LETTER:
            return marks.republished(held, mark, limit=limit)
        return marks.dead_lettered(
            held,
            mark,
            reason=verdict.reason,
            stage=verdict.stage,
            source=self._queues.names.source,
            now=self._clock.now(),
            # Retries need no such note: what bears our header is received as redelivered.
            repeated=held.redelivered or repeats or repeated,
            limit=limit,
        )

    def finish(self) -> Mapping[str, str]:
        """Wait until all is confirmed; returns what failed: message id → why.

        :raises ProducerError: If the channel is lost: then nothing is to be acknowledged.
        """
        refused = {} if self._publisher is None else self._publisher.flush()
        for key, reason in refused.items():
            self.guard.refuse(key, f"RabbitMQ refused: {reason}")
        return self.guard.refused


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
        self._outcome = Outcome(settlement, self._now)

    def run(self, queue: HoldingQueue, now: datetime) -> SettleReport:
        """Settles what the claimed holding queue holds."""
        generation = self._lease.generation
        noted = self._journal.log_of(generation).settled()
        if is_swept(noted):
            return self._lapsed_report()
        expects = self._lease.state.get("bundles") and noted is None
        owner = queue.owner(COUNT_TIMEOUT if expects else 0.0)
        own = owner is not None and owner.generation == generation
        if noted is not None:
            if own:  # killed before the queue was emptied
                empty(queue, self._journal, generation, noted, None)
            return noted.report
        if own:
            return self._settle(queue)
        if now >= self._lease.deadline:
            return self._lapsed_report()
        if self._settlement.expected is None:
            return self._lost_report(queue.name) + self._unheld_report()
        if not self._settlement.expected:
            return self._unheld_report()
        self._publish_staged(removed=True)
        note = f"the holding queue {queue.name!r} was emptied or deleted by hand"
        report = self._report() + SettleReport(errors=(f"{note}: settled from staging",))
        return self._journal.note_settled(generation, report, None).report

    def _settle(self, queue: HoldingQueue) -> SettleReport:
        """Settles its own queue."""
        queue.fence(self._lease.generation)
        if self._is_known() and queue.count(self._counted, COUNT_TIMEOUT) == self._counted:
            covered, counted = None, self._counted
            self._publish_staged(removed=False)
            report = self._report()
        else:
            covered, counted = self._outcome.bundles, None
            self._settle_bundles(queue)
            report = self._report()
            report += SettleReport(errors=tuple(self._removed_by_hand(queue.name, report.lapsed)))
        failed = self._outbox.guard.refused
        noted = self._journal.note_settled(self._lease.generation, report, covered, failed)
        if is_swept(noted):
            return self._lapsed_report()
        if covered is None:
            counted = None if failed else counted
            return empty(queue, self._journal, self._lease.generation, noted, counted)
        for tag, published in self._outcome.tags.items():
            if failed.keys().isdisjoint(published):
                queue.getter.keep(tag)
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

    def _others(self) -> int:
        """How many messages of the manifest were not settled immediately."""
        expected = self._settlement.expected or 0
        if self._settlement.settled_now is not None:
            return max(0, expected - self._unreported.total)
        # Whether the manifest counts those is told by the lease alone.
        counts_all = expected == self._lease.state.get("messages")
        return expected - len(self._now) if counts_all else expected

    def _publish_staged(self, *, removed: bool) -> None:
        """Carries out verdicts by what staging has, on messages of which no bundle was read.

        :param removed: Whether their bundles were removed by hand: these may come back.
        """
        outcome, settlement = self._outcome, self._settlement
        outcome.rest_is_acked = settlement.rest.action is Action.ACK and not removed
        entries = settlement.entries()
        if settlement.everything is not None and not outcome.rest_is_acked:
            others = (e._replace(verdict=settlement.rest) for e in settlement.everything())
            entries = chain(entries, others)
        for entry in entries:
            key, action = entry.message_id, entry.verdict.action
            if key in self._now or key in outcome.became or key in outcome.lost:
                continue
            if action is not Action.ACK:
                held = held_of(entry)
                if held is None:
                    outcome.lost.add(key)
                    continue
                action = self._outbox.carry_out(held, entry.verdict, repeated=removed)
            outcome.became[key] = action
            if removed:
                outcome.staged.add(key)

    # -- by bundles ----------------------------------------------------------------------------

    def _settle_bundles(self, queue: HoldingQueue) -> None:
        """Settles what the holding queue still has, and by staging what it has not any more."""
        outcome = self._outcome
        for delivered in queue.bundles(self._lease.state.get("bundles"), COUNT_TIMEOUT):
            try:
                header, messages = bundles.unpack(delivered.body)
            except BundleError as error:  # it stays where it is
                outcome.errors.append(str(error))
                continue
            if header.generation != self._lease.generation:
                continue  # a sweep judges it by its own journal
            outcome.bundles.append(header.bundle)
            published = outcome.tags[delivered.tag] = []
            for message in messages:
                verdict = outcome.verdict(message)
                if verdict is not None:
                    action = verdict.action
                    if action is not Action.ACK:
                        action = self._outbox.carry_out(message, verdict)
                        published.append(message.message_id)
                    outcome.note(message, action)
        if self._settlement.expected is not None and len(outcome.became) < self._others():
            self._publish_staged(removed=True)

    def _removed_by_hand(self, name: str, lapsed: int) -> Iterator[str]:
        """Describes the bundles that were not there."""
        staged = len(self._outcome.staged)
        if self._settlement.expected is not None and (lapsed or staged):
            counted = self._lease.state.get("bundles", 0)
            missing = max(0, counted - len(self._outcome.bundles))
            yield (
                f"{missing:,} of {many(counted, 'bundle')} {'was' if missing == 1 else 'were'} not"
                f" in the holding queue {name!r}: removed by hand; of the messages"
                f" {staged:,} settled from staging, and {lapsed:,} lost there"
            )

    def _report(self) -> SettleReport:
        """Waits until all is published, and returns the report of it.

        :raises ProducerError: If what failed is in no bundle any more: staging alone has it.
        """
        outcome, failed = self._outcome, self._outbox.finish()
        if not outcome.staged.isdisjoint(failed):
            raise ProducerError(
                "messages whose bundles were removed by hand cannot be published, so nothing was"
                f" settled: {'; '.join(self._outbox.guard.errors())}; mend that and clear the task"
            )
        for key in failed:
            outcome.became.pop(key, None)
        actions = Counter(outcome.became.values()) + outcome.more
        done = self._now | outcome.became | dict.fromkeys(failed, Action.RELEASE)
        lapsed, whole = 0, False
        if self._settlement.expected is not None:
            short = self._others() - actions.total() - len(failed)
            if outcome.rest_is_acked:
                actions[Action.ACK] += short - len(outcome.lost)
                short = len(outcome.lost)
            lapsed, whole = max(0, short), short <= 0
            # What is in no manifest is released as well, and in no account: of a bundle whose
            # confirm never came its messages were received again.
            actions[Action.RELEASE] -= min(max(0, -short), actions[Action.RELEASE])
        if outcome.rest_is_acked:
            done |= dict.fromkeys(outcome.lost, Action.RELEASE)
            again = ComingAgain(frozenset(key for key, a in done.items() if a in COMES_AGAIN))
        else:
            again = ComingAgain.of(done, whole=whole)
        errors = (*outcome.errors, *self._outbox.guard.errors())
        report = report_of(actions, lapsed=lapsed, failed=len(failed), errors=errors)
        return replace(report, again=again) + self._unreported


class Outcome:
    """What becomes of the messages of one settlement.

    :param now: The messages that were settled immediately.
    """

    def __init__(self, settlement: Settlement, now: Collection[str]) -> None:
        #: The names of the bundles that were read.
        self.bundles: list[str] = []
        #: Of each, its delivery tag and the ids of what was published of it.
        self.tags: dict[int, list[str]] = {}
        #: Message id → what was done with it.
        self.became: dict[str, Action] = {}
        #: Further messages of these ids.
        self.more: Counter[Action] = Counter()
        #: The messages without a bundle that were settled from staging, and all of which it lacks
        #: something.
        self.staged: set[str] = set()
        self.lost: set[str] = set()
        #: Whether all messages that nothing names are acknowledged.
        self.rest_is_acked = False
        self.errors: list[str] = []
        self._settlement = settlement
        self._now = now
        self._hashes: dict[str, int] = {}

    @cached_property
    def _named(self) -> dict[str, Verdict]:
        return {entry.message_id: entry.verdict for entry in self._settlement.entries()}

    @cached_property
    def _manifest(self) -> set[str] | None:
        """The messages of the manifest, where the queue may hold others."""
        everything = self._settlement.everything
        if self._settlement.rest.action is Action.RELEASE or everything is None:
            return None
        return {entry.message_id for entry in everything()}

    def verdict(self, message: Held) -> Verdict | None:
        """What is to be done with a message; ``None`` if it was done before."""
        key, named, manifest = message.message_id, self._named, self._manifest
        if key in self._now:
            return None
        if self._settlement.expected is not None:
            if self._hashes.get(key) == _hash_of(message):
                return None
            listed = manifest is None or key in manifest or key in named
            if key in self.became or not listed:
                return RELEASE  # received, and in no manifest
        return named.get(key, self._settlement.rest)

    def note(self, message: Held, action: Action) -> None:
        """Note what is done with a message."""
        key = message.message_id
        if key in self.became:  # of a generation without a manifest: all of it is released
            self.more[action] += 1
            return
        self.became[key] = action
        self._hashes[key] = _hash_of(message)


class Progress:
    """What is done of a generation's messages, by its journal.

    :param settled: How it was settled, if that is known.
    """

    def __init__(self, log: GenerationLog, settled: Settled | None = None) -> None:
        self._settled = settled or log.settled()
        names = log.names()
        self._done = {**log.now(names), **log.done(names)}

    def left(self, header: Header, messages: Sequence[Held]) -> list[Held]:
        """The messages of a bundle that are still to be handled."""
        if self._settled is not None:
            covered, failed = (self._settled.details[name] for name in ("bundles", "failed"))
            if covered is None or header.bundle in covered:
                messages = [message for message in messages if message.message_id in failed]
        return [message for message in messages if message.message_id not in self._done]


def empty(
    queue: HoldingQueue,
    journal: QueueJournal,
    generation: str,
    noted: Settled,
    expected: int | None,
) -> SettleReport:
    """Remove the bundles of which a noted settlement has done all, and free the holding queue.

    :param expected: How many there are, where all is done and that is known: these are purged.
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
        progress = Progress(journal.log_of(generation), noted)
        for delivered in queue.bundles(None, 0.0):
            try:
                header, messages = bundles.unpack(delivered.body)
            except BundleError as error:
                log.error("A message stays in %r: %s.", queue.name, error)
                continue
            if header.generation == generation and not progress.left(header, messages):
                queue.getter.keep(delivered.tag)
    queue.free()
    return report


def _has_all(entry: Entry) -> bool:
    """Whether a verdict can be carried out without the message's bundle."""
    return entry.verdict.action is Action.ACK or held_of(entry) is not None


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
    outbox = Outbox(connection, queues, env.clock, generation, env.clock.now())
    known: dict[str, Progress] = {}
    errors: list[str] = []
    # Delivery tag → generation, and the ids of what is released.
    released: dict[int, tuple[str, list[str]]] = {}
    for delivered in queue.bundles(queue.count(None, 0.0), COUNT_TIMEOUT):
        try:
            header, messages = bundles.unpack(delivered.body)
        except BundleError as error:
            errors.append(str(error))
            continue
        if header.generation not in known:
            known[header.generation] = Progress(journal.log_of(header.generation))
        left = known[header.generation].left(header, messages)
        for message in left:
            outbox.carry_out(message._replace(redelivered=True), RELEASE)
        released[delivered.tag] = header.generation, [message.message_id for message in left]
    failed = outbox.finish()
    for tag, (other, ids) in released.items():
        if failed.keys().isdisjoint(ids):
            queue.getter.keep(tag)
        else:  # the bundle stays, for the next sweep
            done = (key for key in ids if key not in failed)
            journal.log_of(other).note_done(dict.fromkeys(done, Action.RELEASE))
    queue.free()
    for text in (*outbox.guard.errors(), *dict.fromkeys(errors)):
        log.error("In the holding queue %r: %s.", queue.name, text)
    count = sum(len(ids) for _, ids in released.values()) - len(failed)
    if count:
        log.warning(
            "Generation %s has ended and left %s in %r: released into the source queue.",
            generation,
            many(count, "message"),
            queue.name,
        )
