"""Carries out the verdicts of one generation, on its claimed and fenced holding queue.

Normally no bundle is read: every verdict is known, and the queue has as many bundles as the lease
counts.  Failed messages are republished from staging, the journal records the settlement, and a
purge removes all bundles together.  If the counts differ or staging is incomplete, they are read.
Each is acknowledged after its publications are confirmed and recorded.  The bundle of a message
that cannot be published stays in the queue, and the record lists these messages.

A kill between any two steps loses nothing.  Before the record the bundles are still in the queue,
and settling starts again: publications may then be duplicated, marked.  After the record the
bundles that it covers need no handling.

A run begins with a sweep: it takes over holding queues whose generation is settled, or whose lease
has lapsed.  The unsettled messages of such a generation are released into the source queue, marked,
for any run.  Each bundle is acknowledged after the confirms of its messages, so the next sweep
completes an interrupted one.
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
from airflow_broadway.core.text import pluralize
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

#: The name of one settlement of a generation, and whether it may duplicate another's publications.
Turn = tuple[str, bool]


def held_of(entry: Entry) -> Held | None:
    """Converts a staged message to a bundled one; ``None`` if staging lacks a part of it."""
    try:
        route, properties, redelivered = staged_delivery(entry.properties)
    except ProducerError:
        return None
    if entry.payload is None:
        return None
    return Held(entry.message_id, entry.attempt, redelivered, route, properties, entry.payload)


class Outbox:
    """The publications of one settlement.

    A message that cannot be published, or that the broker refuses, counts as failed: its bundle
    must stay in the holding queue.

    :param deadline: The end of the lease.
    :param turn: Called before the first message is published; by default it records a turn for the
        whole generation.
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

    def carry_out(self, message: Held, verdict: Verdict, *, repeated: bool = False) -> Action:
        """Carries out a verdict other than ``ACK``; :meth:`finish` returns the failures.

        :param repeated: Whether another settlement may publish a duplicate; set on dead letters.
        :returns: The action: a message without room for a retry's mark is dead-lettered.
        """
        action = verdict.action
        with self.guard.isolate(message.message_id):
            try:
                self._publish(message, verdict, repeated)
            except marks.TooLarge as error:
                if action is Action.DEAD_LETTER:
                    raise
                action = Action.DEAD_LETTER
                reason = f"it cannot be delivered again: {error}"
                self._publish(message, Verdict(action, 0.0, reason, "settle"), repeated)
        return action

    def _publish(self, message: Held, verdict: Verdict, repeated: bool) -> None:
        exchange, key = self._place(message, verdict)
        self._queues.check_place(self._connection, exchange, key)
        properties = self._properties(message, verdict, repeated)
        if len(key.encode()) > 255:
            raise ProducerError(f"its routing key cannot be published again: {key!r}")
        if self._publisher is None:
            self._publisher = Publisher(self._connection, marks.publication_key)
        self._publisher.publish(exchange, key, properties, message.body, key=message.message_id)

    def _place(self, message: Held, verdict: Verdict) -> tuple[str, str]:
        """Returns the exchange and routing key for a verdict."""
        if verdict.action is Action.DEAD_LETTER:
            self._queues.ensure_dead(self._connection)
            return self._queues.dead_for(message.route)
        delay = verdict.delay if verdict.action is Action.RETRY else 0.0
        if verdict.action is Action.LEAVE:
            delay = (self._deadline - self._clock.now()).total_seconds()
        step = rung(delay)
        if step is None:
            return "", self._queues.names.source
        return "", self._queues.ensure_delay(self._connection, step)

    def _properties(self, message: Held, verdict: Verdict, repeated: bool) -> bytes:
        turn, repeats = self._turn = self._turn or self._next_turn()
        action, limit = verdict.action, self._connection.max_properties
        attempt = message.attempt + (1 if action is Action.RETRY else 0)
        mark = marks.Mark(message.message_id, self._generation, attempt, turn)
        if action is not Action.DEAD_LETTER:
            return marks.republished(message, mark, limit=limit)
        return marks.dead_lettered(
            message,
            mark,
            reason=verdict.reason,
            stage=verdict.stage,
            source=self._queues.names.source,
            now=self._clock.now(),
            # Not on retries: a marked message is always received as redelivered.
            repeated=message.redelivered or repeats or repeated,
            limit=limit,
        )

    def finish(self) -> Mapping[str, str]:
        """Waits for all confirms; returns the failures: message id → reason.

        :raises ProducerError: If the channel is lost: then nothing may be acknowledged.
        """
        refused = {} if self._publisher is None else self._publisher.flush()
        for key, reason in refused.items():
            self.guard.refuse(key, f"RabbitMQ refused: {reason}")
        return self.guard.refused


#: Seconds to wait until the queue's depth equals the lease's count.
COUNT_TIMEOUT = 3.0


def unheld_report(journal: QueueJournal, lease: Lease, settlement: Settlement) -> SettleReport:
    """Reports a generation without held messages: those that were settled immediately."""
    now = journal.log_of(lease.generation).now()
    again = ComingAgain.of(now, whole=not settlement.expected)
    return replace(beyond(report_of(now.values()), settlement), again=again)


class LeaseSettlement:
    """A settlement of one generation.

    :param outbox: Carries out the verdicts.
    """

    def __init__(
        self, journal: QueueJournal, lease: Lease, settlement: Settlement, outbox: Outbox
    ) -> None:
        self._journal = journal
        self._lease = lease
        self._settlement = settlement
        self._outbox = outbox
        self._now = journal.log_of(lease.generation).now()
        # The messages settled immediately that the settlement does not include.
        self._unreported = beyond(report_of(self._now.values()), settlement)
        # The number of bundles by the lease; ``None`` if there may be others.
        self._counted = None if lease.state.get("extra", 1) else lease.state.get("bundles")
        self._outcome = Outcome(settlement, self._now)

    def run(self, queue: HoldingQueue, now: datetime) -> SettleReport:
        """Settles the messages of the claimed holding queue."""
        generation = self._lease.generation
        noted = self._journal.log_of(generation).settled()
        if is_swept(noted):
            return self._lapsed_report()
        expects = self._lease.state.get("bundles") and noted is None
        owner = queue.owner(COUNT_TIMEOUT if expects else 0.0)
        is_own = owner is not None and owner.generation == generation
        if noted is not None:
            if is_own:  # an earlier settlement was killed before the queue was emptied
                empty(queue, self._journal, generation, noted, None)
            return noted.report
        if is_own:
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
        """Settles the generation's own holding queue."""
        queue.fence(self._lease.generation)
        if self._staging_suffices() and queue.count(self._counted, COUNT_TIMEOUT) == self._counted:
            covered, counted = None, self._counted
            self._publish_staged(removed=False)
            report = self._report()
        else:
            covered, counted = self._outcome.bundles, None
            self._settle_bundles(queue)
            report = self._report()
            report += SettleReport(errors=tuple(self._describe_missing(queue.name, report.lapsed)))
        failed = self._outbox.guard.refused
        noted = self._journal.note_settled(self._lease.generation, report, covered, failed)
        if is_swept(noted):
            return self._lapsed_report()
        if covered is None:
            counted = None if failed else counted
            return empty(queue, self._journal, self._lease.generation, noted, counted)
        for tag, published in self._outcome.tags.items():
            if failed.keys().isdisjoint(published):
                queue.getter.mark_for_ack(tag)
        queue.free()
        return noted.report

    # -- reports without bundles ---------------------------------------------------------------

    def _unheld_report(self) -> SettleReport:
        return unheld_report(self._journal, self._lease, self._settlement)

    def _lapsed_report(self) -> SettleReport:
        """Reports a generation whose messages another run has received or will receive."""
        early = self._unheld_report()
        return SettleReport(lapsed=max(0, (self._settlement.expected or 0) - early.total)) + early

    def _lost_report(self, name: str) -> SettleReport:
        """Reports a generation that published no manifest, and whose bundles were deleted."""
        if not self._lease.state.get("bundles"):  # the lease is from before the first message
            return SettleReport()
        count = int(self._lease.state.get("messages", 0)) - len(self._now)
        lost = pluralize(count, "message") if count > 0 else "all of it"
        error = (
            f"the holding queue {name!r} was emptied or deleted by hand before this run had"
            f" published its manifest: its messages are lost ({lost}); holding queues are emptied"
            " by this package alone"
        )
        log.error("%s", error, extra={"code": "holding_queue_emptied"})
        return SettleReport(lapsed=max(0, count), errors=(error,))

    # -- from staging --------------------------------------------------------------------------

    def _staging_suffices(self) -> bool:
        """Whether staging has all that is needed, so that no bundle is read."""
        expected, messages = self._settlement.expected, self._lease.state.get("messages", -1)
        return (
            self._settlement.rest.action is Action.ACK
            and expected is not None
            and self._counted is not None
            and expected in (messages, messages - len(self._now))
            and all(map(_can_carry_out, self._settlement.entries()))
        )

    def _count_others(self) -> int:
        """Counts the manifest's messages that were not settled immediately."""
        expected = self._settlement.expected or 0
        if self._settlement.settled_now is not None:
            return max(0, expected - self._unreported.total)
        # Only the lease shows whether the manifest includes those.
        counts_all = expected == self._lease.state.get("messages")
        return expected - len(self._now) if counts_all else expected

    def _publish_staged(self, *, removed: bool) -> None:
        """Carries out verdicts from staging, for messages whose bundles were not read.

        :param removed: Whether their bundles were removed by hand; they may still be redelivered.
        """
        outcome, settlement = self._outcome, self._settlement
        outcome.rest_is_acked = settlement.rest.action is Action.ACK and not removed
        entries = settlement.entries()
        if settlement.everything is not None and not outcome.rest_is_acked:
            others = (e._replace(verdict=settlement.rest) for e in settlement.everything())
            entries = chain(entries, others)
        for entry in entries:
            key, action = entry.message_id, entry.verdict.action
            if key in self._now or key in outcome.actions or key in outcome.lost:
                continue
            if action is not Action.ACK:
                message = held_of(entry)
                if message is None:
                    outcome.lost.add(key)
                    continue
                action = self._outbox.carry_out(message, entry.verdict, repeated=removed)
            outcome.actions[key] = action
            if removed:
                outcome.staged.add(key)

    # -- from bundles --------------------------------------------------------------------------

    def _settle_bundles(self, queue: HoldingQueue) -> None:
        """Settles the bundles in the holding queue, and the missing messages from staging."""
        outcome = self._outcome
        for delivered in queue.bundles(self._lease.state.get("bundles"), COUNT_TIMEOUT):
            try:
                header, messages = bundles.unpack(delivered.body)
            except BundleError as error:  # it stays in the queue
                outcome.errors.append(str(error))
                continue
            if header.generation != self._lease.generation:
                continue  # a sweep settles it, by its own journal
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
        if self._settlement.expected is not None and len(outcome.actions) < self._count_others():
            self._publish_staged(removed=True)

    def _describe_missing(self, name: str, lapsed: int) -> Iterator[str]:
        """Describes the missing bundles."""
        staged = len(self._outcome.staged)
        if self._settlement.expected is not None and (lapsed or staged):
            counted = self._lease.state.get("bundles", 0)
            missing = max(0, counted - len(self._outcome.bundles))
            yield (
                f"{missing:,} of {pluralize(counted, 'bundle')} {'was' if missing == 1 else 'were'}"
                f" not in the holding queue {name!r}: removed by hand; of the messages"
                f" {staged:,} settled from staging, and {lapsed:,} lost there"
            )

    def _report(self) -> SettleReport:
        """Waits for all confirms, and returns the report.

        :raises ProducerError: If a failed message is in no bundle: only staging has it.
        """
        outcome, failed = self._outcome, self._outbox.finish()
        if not outcome.staged.isdisjoint(failed):
            raise ProducerError(
                "messages whose bundles were removed by hand cannot be published, so nothing was"
                f" settled: {'; '.join(self._outbox.guard.errors())}; fix this and clear the task"
            )
        for key in failed:
            outcome.actions.pop(key, None)
        actions = Counter(outcome.actions.values()) + outcome.more
        done = self._now | outcome.actions | dict.fromkeys(failed, Action.RELEASE)
        lapsed, whole = 0, False
        if self._settlement.expected is not None:
            short = self._count_others() - actions.total() - len(failed)
            if outcome.rest_is_acked:
                actions[Action.ACK] += short - len(outcome.lost)
                short = len(outcome.lost)
            lapsed, whole = max(0, short), short <= 0
            # Messages in no manifest are released too, but not counted: those of a bundle without
            # a confirm were received again.
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
    """The outcomes of the messages of one settlement.

    :param now: The messages that were settled immediately.
    """

    def __init__(self, settlement: Settlement, now: Collection[str]) -> None:
        #: The ids of the bundles that were read.
        self.bundles: list[str] = []
        #: Delivery tag of a bundle → ids of its messages that were published.
        self.tags: dict[int, list[str]] = {}
        #: Message id → action that was carried out.
        self.actions: dict[str, Action] = {}
        #: The actions for further messages with these ids.
        self.more: Counter[Action] = Counter()
        #: The messages without a bundle that were settled from staging, and the messages that
        #: staging has only in part.
        self.staged: set[str] = set()
        self.lost: set[str] = set()
        #: Whether all messages without a verdict of their own are acknowledged.
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
        """The messages of the manifest, if the queue may hold others."""
        everything = self._settlement.everything
        if self._settlement.rest.action is Action.RELEASE or everything is None:
            return None
        return {entry.message_id for entry in everything()}

    def verdict(self, message: Held) -> Verdict | None:
        """Returns the verdict for a message; ``None`` if it was carried out already."""
        key, named, manifest = message.message_id, self._named, self._manifest
        if key in self._now:
            return None
        if self._settlement.expected is not None:
            if self._hashes.get(key) == _hash_of(message):
                return None
            listed = manifest is None or key in manifest or key in named
            if key in self.actions or not listed:
                return RELEASE  # received, but in no manifest
        return named.get(key, self._settlement.rest)

    def note(self, message: Held, action: Action) -> None:
        """Records the action for a message."""
        key = message.message_id
        if key in self.actions:  # a generation without a manifest releases all messages
            self.more[action] += 1
            return
        self.actions[key] = action
        self._hashes[key] = _hash_of(message)


class Progress:
    """The progress of a generation's settlement, from its journal.

    :param settled: The record of its settlement, if it was read already.
    """

    def __init__(self, log: GenerationLog, settled: Settled | None = None) -> None:
        self._settled = settled or log.settled()
        names = log.names()
        self._done = {**log.now(names), **log.done(names)}

    def left(self, header: Header, messages: Sequence[Held]) -> list[Held]:
        """Returns the messages of a bundle that are not settled yet."""
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
    """Removes the bundles that a recorded settlement has completed, and frees the holding queue.

    :param expected: The number of bundles to purge, if all are completed; ``None`` reads them.
    :returns: The report; with an error if other bundles were published meanwhile.
    """
    report = noted.report
    if expected is not None and queue.count(None, 0.0) == expected:
        purged = queue.purge()
        if purged != expected:
            error = (
                f"the holding queue {queue.name!r} held {pluralize(purged, 'bundle')} when it was"
                f" purged, and {expected} were expected: another program published to it"
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
                queue.getter.mark_for_ack(delivered.tag)
    queue.free()
    return report


def _can_carry_out(entry: Entry) -> bool:
    """Whether a verdict can be carried out without the message's bundle."""
    return entry.verdict.action is Action.ACK or held_of(entry) is not None


def _hash_of(message: Held) -> int:
    return hash((message.attempt, message.route, message.properties, message.body))


# -- sweeps ---------------------------------------------------------------------------------------


def sweep(connection: ConnectionThread, queues: StandingQueues, env: ProducerEnv) -> None:
    """Takes over holding queues of dead generations.  Errors are logged; the run continues."""
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
    """Returns the owner of a holding queue, if it is settled or its lease has lapsed."""
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
    progress: dict[str, Progress] = {}
    errors: list[str] = []
    # Delivery tag → generation, and ids of the released messages.
    released: dict[int, tuple[str, list[str]]] = {}
    for delivered in queue.bundles(queue.count(None, 0.0), COUNT_TIMEOUT):
        try:
            header, messages = bundles.unpack(delivered.body)
        except BundleError as error:
            errors.append(str(error))
            continue
        if header.generation not in progress:
            progress[header.generation] = Progress(journal.log_of(header.generation))
        left = progress[header.generation].left(header, messages)
        for message in left:
            outbox.carry_out(message._replace(redelivered=True), RELEASE)
        released[delivered.tag] = header.generation, [message.message_id for message in left]
    failed = outbox.finish()
    for tag, (other, ids) in released.items():
        if failed.keys().isdisjoint(ids):
            queue.getter.mark_for_ack(tag)
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
            pluralize(count, "message"),
            queue.name,
        )
