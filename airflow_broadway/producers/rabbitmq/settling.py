"""Carries out the verdicts of one lease.

While the lease is held and everything is known, bundles are never read: failures are published
again from staging, the journal notes that all is done, and deleting the lease queue acknowledges
every bundle at once.  In all other cases the bundles are read and compared by message id; none is
acknowledged before all that follows from it is confirmed and noted.

A kill between any two steps loses nothing: before the note, the bundles are still there, and
settling begins anew (what was published again may then exist twice, marked); after it, the bundles
have nothing left to handle, wherever they turn up.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.custody import (
    RELEASE,
    Action,
    Entry,
    Lease,
    Settlement,
    SettleReport,
    Verdict,
)
from airflow_broadway.core.errors import ProducerError, StagingError
from airflow_broadway.core.manifest import MAX_REASON, cut
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.bundle import Header, Held
from airflow_broadway.producers.rabbitmq.getter import Getter
from airflow_broadway.producers.rabbitmq.journal import Journal
from airflow_broadway.producers.rabbitmq.link import Link
from airflow_broadway.producers.rabbitmq.properties import Mark, encode, load, republished
from airflow_broadway.producers.rabbitmq.publisher import Publisher
from airflow_broadway.producers.rabbitmq.queues import rung
from airflow_broadway.producers.rabbitmq.returns import load_staged, rest_header
from airflow_broadway.producers.rabbitmq.topology import Topology

if TYPE_CHECKING:
    from airflow_broadway.core.clock import Clock

__all__ = ["Settling", "report_of"]

log = logging.getLogger(__name__)

_COUNTS = {
    Action.ACK: "acked",
    Action.RETRY: "requeued",
    Action.DEAD_LETTER: "dead_lettered",
    Action.LEAVE: "left",
    Action.RELEASE: "released",
}
#: Seconds to wait for bundles that another process held until just now.
_PATIENCE = 3.0


def report_of(
    actions: Counter[Action],
    *,
    lapsed: int = 0,
    failed: int = 0,
    errors: tuple[str, ...] = (),
) -> SettleReport:
    """The report of so many verdicts carried out."""
    counts = {_COUNTS[action]: count for action, count in actions.items()}
    return SettleReport(**counts, lapsed=lapsed, failed=failed, errors=errors)


class Settling:
    """One settlement at work.

    :param queue: The lease queue.
    :param whole: Whether the whole lease is settled; else single messages, at once.
    """

    def __init__(
        self,
        link: Link,
        topology: Topology,
        journal: Journal,
        lease: Lease,
        queue: str,
        clock: Clock,
        *,
        whole: bool,
    ) -> None:
        self._link = link
        self._topology = topology
        self._journal = journal
        self._lease = lease
        self._clock = clock
        self._queue = queue
        self._whole = whole
        self._begun: bool | None = None
        self._now = journal.now(lease.generation)
        self._opened: Publisher | None = None
        # What was published, in case it is refused: the messages of the last stretch.
        self._sent: dict[str, tuple[Held, Action]] = {}
        self._refused: dict[str, str] = {}
        self._returned_to: dict[str, tuple[Held, Action]] = {}

    # -- with everything known -----------------------------------------------------------------

    def known(self, settlement: Settlement, depth: int, held: bool) -> bool:
        """Whether the bundles need not be read."""
        state, expected = self._lease.state, settlement.expected
        messages = state.get("messages", -1)
        return bool(
            held
            and settlement.rest.action is Action.ACK
            and expected is not None
            and expected in (messages, messages - len(self._now))
            and not state.get("extra", 1)
            and depth >= state.get("bundles", depth + 1)
            and all(
                entry.payload is not None or entry.verdict.action is Action.ACK
                for entry in settlement.entries()
            )
        )

    def by_staging(self, settlement: Settlement) -> SettleReport | None:
        """Settle without reading bundles; ``None`` if the lease came too near to its end."""
        actions = self._publish_entries(settlement.entries())
        failed, errors = self._flush(actions)
        total = self._lease.state["messages"] - len(self._now)
        actions[Action.ACK] = (
            total
            - failed
            - sum(count for action, count in actions.items() if action is not Action.ACK)
        )
        if self._clock.now() >= self._lease.deadline:
            return None
        report = report_of(actions, failed=failed, errors=errors)
        self._journal.note_settled(self._lease.generation, report.to_json(), None)
        self._topology.delete(self._link, self._queue)
        return report

    def without_bundles(self, settlement: Settlement) -> SettleReport:
        """Settle although somebody deleted the lease queue: staging still has every message."""
        actions = self._publish_entries(settlement.entries())
        rest = settlement.rest
        expected = settlement.expected or 0
        lost = 0
        if rest.action is not Action.ACK:
            named = {entry.message_id for entry in settlement.entries()}
            everything = settlement.everything() if settlement.everything else iter(())
            others = [e for e in everything if e.message_id not in named]
            lost = sum(1 for entry in others if entry.payload is None)
            actions += self._publish_entries(
                entry._replace(verdict=rest) for entry in others if entry.payload is not None
            )
        failed, errors = self._flush(actions)
        if rest.action is Action.ACK:
            total = (
                expected - len(self._now)
                if expected == self._lease.state.get("messages")
                else expected
            )
            actions[Action.ACK] = (
                total
                - failed
                - sum(count for action, count in actions.items() if action is not Action.ACK)
            )
        note = f"the lease queue {self._queue!r} was deleted: settled from staging"
        report = report_of(actions, lapsed=lost, failed=failed, errors=(*errors, note))
        self._journal.note_settled(self._lease.generation, report.to_json(), None)
        return report

    def _publish_entries(self, entries: Iterator[Entry]) -> Counter[Action]:
        actions: Counter[Action] = Counter()
        for entry in entries:
            if entry.message_id in self._now:
                continue
            actions[entry.verdict.action] += 1
            if entry.verdict.action is not Action.ACK:
                self.carry_out(held_of(entry), entry.verdict)
        return actions

    # -- by bundles ----------------------------------------------------------------------------

    def by_bundles(self, settlement: Settlement, *, held: bool, crashed: bool) -> SettleReport:
        """Settle what the lease queue still has.

        :param held: Whether the lease has not come to its end: then nothing can be under way from
            the lease queue, and with a manifest nothing to it.
        """
        published = settlement.expected is not None
        if not published:
            self._topology.fence(self._link, self._queue)
        self._topology.ensure_returns(self._link)
        verdicts = {entry.message_id: entry.verdict for entry in settlement.entries()}
        known = self._named(settlement)
        getter = Getter(self._link, self._queue)
        actions: Counter[Action] = Counter()
        handled: list[str] = []
        seen: set[str] = set()
        errors: list[str] = []
        for tag, body in self._bundles(getter, held):
            try:
                header, messages = bundles.unpack(body)
                if header.staged is not None:
                    messages = load_staged(header, self._journal)
            except (ProducerError, StagingError) as error:
                errors.append(str(error))
                continue
            handled.append(header.bundle)
            getter.keep(tag)
            released = []
            for message in messages:
                key = message.message_id
                if key in self._now or key in seen:
                    continue
                verdict = verdicts.get(key, settlement.rest)
                if known is not None and key not in known and key not in verdicts:
                    verdict = RELEASE
                elif published:
                    seen.add(key)
                    actions[verdict.action] += 1
                else:
                    actions[verdict.action] += 1
                if verdict.action is Action.RELEASE:
                    released.append(
                        message._replace(crashes=message.crashes + 1) if crashed else message
                    )
                elif verdict.action is not Action.ACK:
                    self.carry_out(message, verdict)
            if released:
                self._give_back(header, released)
        failed, more = self._flush(actions)
        lapsed = 0
        if settlement.expected is not None:
            told = sum(actions.values()) + failed + len(self._now)
            lapsed = max(0, settlement.expected - told)
        report = report_of(
            actions, lapsed=lapsed, failed=failed, errors=tuple(dict.fromkeys([*errors, *more]))
        )
        self._journal.note_settled(self._lease.generation, report.to_json(), handled)
        if published and held and not errors:
            self._topology.delete(self._link, self._queue)
        else:
            getter.ack()
        getter.close()
        return report

    def _named(self, settlement: Settlement) -> set[str] | None:
        """The ids that the manifest names, where the queue may hold others; else ``None``."""
        if settlement.rest.action is Action.RELEASE or settlement.everything is None:
            return None
        return {entry.message_id for entry in settlement.everything()}

    def _bundles(self, getter: Getter, held: bool) -> Iterator[tuple[int, bytes]]:
        """Every bundle of the lease queue, one at a time, unacknowledged.

        Waits a little for those that a process held that has just died.
        """
        wanted = int(self._lease.state.get("bundles", 0)) if held else 0
        count, end = 0, time.monotonic() + _PATIENCE
        while True:
            got = getter.get()
            if got is not None:
                count += 1
                yield got
            elif count >= wanted or time.monotonic() > end:
                return
            else:
                time.sleep(0.1)

    def _give_back(self, header: Header, messages: list[Held]) -> None:
        """Put released messages into the returns queue, in one bundle."""
        name = f"{header.bundle}.released"
        again = rest_header(header, name, len(messages))
        properties = encode({"delivery_mode": 2, "message_id": name})
        self._publisher.publish(
            "",
            self._topology.queues.returns,
            properties,
            bundles.pack(again, [m._replace(redelivered=True) for m in messages]),
            key=name,
        )

    # -- one message ---------------------------------------------------------------------------

    def carry_out(self, held: Held, verdict: Verdict) -> None:
        """Publish what follows from a verdict other than ``ACK``; confirmed by :meth:`flush`."""
        action = verdict.action
        attempt = held.attempt + (1 if action is Action.RETRY else 0)
        extra: dict[str, Any] = {}
        exchange, delay = "", 0.0
        if action is Action.DEAD_LETTER:
            exchange, routing_key = self._topology.dead
            self._topology.ensure_dead(self._link)
            repeats = self._repeats()
            extra = {
                # Retries need no such mark: what bears our header is received as redelivered.
                **({"x-broadway-redelivered": True} if held.redelivered or repeats else {}),
                "x-broadway-reason": cut(verdict.reason, MAX_REASON),
                "x-broadway-stage": verdict.stage,
                "x-broadway-queue": self._topology.queues.source,
                "x-broadway-dead-at": self._clock.now().isoformat(),
            }
        else:
            if action is Action.RETRY:
                delay = verdict.delay
            elif action is Action.LEAVE:
                delay = (self._lease.deadline - self._clock.now()).total_seconds()
            step = rung(delay)
            routing_key = (
                self._topology.queues.source
                if step is None
                else self._topology.ensure_delay(self._link, step)
            )
        mark = Mark(held.message_id, self._lease.generation, attempt)
        self._sent[held.message_id] = (held, action)
        self._publisher.publish(
            exchange,
            routing_key,
            republished(held.properties, mark, extra=extra),
            held.body,
            key=held.message_id,
        )
        if len(self._sent) > 5_000:
            self._checkpoint()

    def _repeats(self) -> bool:
        """Whether an earlier try of this settlement may have published the same before."""
        if self._begun is None:
            self._begun = self._whole and self._journal.begun(self._lease.generation)
            if self._whole and not self._begun:
                self._journal.note_begun(self._lease.generation)
        return self._begun

    def flush(self) -> dict[str, str]:
        """Wait until all is confirmed; what was refused, and why."""
        refused = {**self._refused, **self._publisher.flush()} if self._opened else {}
        self._refused = {}
        return refused

    @property
    def _publisher(self) -> Publisher:
        if self._opened is None:
            self._opened = Publisher(self._link)
        return self._opened

    def _checkpoint(self) -> None:
        """Forget what is confirmed, so that memory stays flat."""
        refused = self._publisher.flush()
        self._refused.update(refused)
        self._returned_to.update({key: self._sent[key] for key in refused if key in self._sent})
        self._sent.clear()

    def _flush(self, actions: Counter[Action]) -> tuple[int, tuple[str, ...]]:
        """Wait for all confirms.  What was refused goes to the returns queue, and counts as failed.

        :raises ProducerError: If that is refused too: then nothing is acknowledged.
        """
        if self._opened is None:
            return 0, ()
        self._checkpoint()
        refused, self._refused = self._refused, {}
        if not refused:
            return 0, ()
        reasons = tuple(sorted({f"RabbitMQ refused: {reason}" for reason in refused.values()}))
        failed = [self._returned_to.pop(key, None) for key in refused]
        if any(each is None for each in failed):
            raise ProducerError(
                f"the returns queue {self._topology.queues.returns!r} takes nothing"
                f" ({reasons[0]}): nothing was settled; make room and clear the task"
            )
        self._topology.ensure_returns(self._link)
        header = Header(
            bundle=f"{self._lease.generation}.refused.{time.time_ns():x}",
            generation=self._lease.generation,
            queue=self._topology.queues.source,
            count=0,
            owner=self._lease.owner,
        )
        messages = []
        for each in failed:
            assert each is not None
            actions[each[1]] -= 1
            messages.append(each[0])
        for start in range(0, len(messages), bundles.MAX_MESSAGES):
            part = messages[start : start + bundles.MAX_MESSAGES]
            self._give_back(replace(header, bundle=f"{header.bundle}.{start}"), part)
        again = self._publisher.flush()
        if again:
            raise ProducerError(
                f"the returns queue {self._topology.queues.returns!r} takes nothing"
                f" ({next(iter(again.values()))}): nothing was settled; make room, clear the task"
            )
        return len(failed), reasons


def held_of(entry: Entry) -> Held:
    """A staged message as a bundle would hold it."""
    route, properties, again = load(entry.properties)
    return Held(entry.message_id, entry.attempt, 0, again, route, properties, entry.payload or b"")
