"""Extends and settles the leases of one consumer group; usable from any process.

A settlement first publishes copies to the retry topic and the dead-letter topic, and waits until
they are confirmed.  Then it records its plan, which every later settlement follows, commits the
offsets, records the report, and ends the claims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import CLASS_OF, ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, RELEASE, Action
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import pluralize
from airflow_broadway.producers.kafka.claims import (
    Claims,
    Committed,
    Place,
    group_files,
    name_of,
    place_named,
)
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.options import KafkaOptions, place_of
from airflow_broadway.producers.kafka.outbox import CopyRequest, Outbox
from airflow_broadway.producers.kafka.settling import Claim, Decision, Read, end_claim, keep_order
from airflow_broadway.producers.kit.checks import check_lease
from airflow_broadway.producers.kit.reports import beyond, report_of
from airflow_broadway.producers.kit.state_files import day_of, timestamp_of

#: The number of settled generations that a claim records.
_KEPT_SETTLED: Final = 5
_NOTHING: Final = Settlement(rest=RELEASE)

#: Entries, or decisions, by partition and offset.
_Entries = dict[Place, dict[int, Entry]]
_Decisions = Mapping[Place, Mapping[int, Decision]]


class KafkaCustodian:
    """Extends and settles the generations of one group."""

    def __init__(self, producer: KafkaOptions, env: ProducerEnv) -> None:
        self.producer, self.env = producer, env
        self._cluster: Cluster | None = None

    def renew(self, lease: Lease) -> Lease | None:
        work = _GenerationSettlement(self, lease)
        now = self.now()
        if work.files.ended() or now >= work.until():
            return None
        deadline = now + lease.seconds
        work.files.hold(deadline, lease.owner)
        # Checked after the write: another run may have taken over the claim before it.
        if not all(work.is_own(work.claims.read(place)) for place in work.read):
            return None
        return replace(lease, deadline=timestamp_of(deadline))

    def holds(self, lease: Lease) -> bool:
        work = _GenerationSettlement(self, lease)
        return not work.files.ended() and self.now() < work.until()

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        work = _GenerationSettlement(self, lease, settlement)
        if work.stopped and not work.read:  # it claimed no partition
            if work.files.deadline() is not None:  # but recorded a lease
                work.files.forget_soon(work.today)
            return SettleReport(lapsed=settlement.expected or 0, again=ComingAgain(all_but=True))
        return work.settle()

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        named = {entry.message_id: entry for entry in entries}
        if not named:
            return SettleReport()
        work = _GenerationSettlement(self, lease)
        if work.files.ended():
            return SettleReport(lapsed=len(named), undone=frozenset(named))
        return work.settle_now(named)

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def now(self) -> float:
        """Returns the seconds since 1970."""
        return self.env.clock.now().timestamp()

    @property
    def cluster(self) -> Cluster:
        """The cluster; connected on first use."""
        if self._cluster is None:
            self._cluster = Cluster(self.producer, self.env)
        return self._cluster


class _GenerationSettlement:
    """Settles one generation by its claims, its plan and its recorded progress."""

    def __init__(
        self, custodian: KafkaCustodian, lease: Lease, settlement: Settlement = _NOTHING
    ) -> None:
        self._custodian, self._producer = custodian, custodian.producer
        self._lease, self._settlement = lease, settlement
        check_lease(lease, self._producer.kind, self._producer.place)
        state = lease.state
        files = group_files(
            custodian.env.staging, str(state.get("cluster", "")), self._producer.group_id
        )
        folder = str(state.get("backfill") or "claims")
        self.claims = Claims(files, folder)
        self.files = self.claims.generation(lease.generation)
        self.today = day_of(custodian.env.clock.now())
        self.stopped = bool(state.get("stopped"))
        self._backfill = bool(state.get("backfill"))
        self._has_retries = self._producer.order == "none" and not self._backfill
        #: The range that its source has read, by partition.
        self.read: dict[Place, Read] = {
            place_named(name): Read(start, end, messages, tuple((a, b) for a, b in left))
            for name, (messages, start, end, left) in state.get("read", {}).items()
        }
        #: The partitions of which it may hold a claim.
        self._places = list(self.read if self.stopped else map(place_named, state.get("own", ())))
        self._at_once: _Decisions = {}

    def until(self) -> float:
        """Returns the newest recorded deadline of the lease."""
        return max(self._lease.deadline.timestamp(), self.files.deadline() or 0.0)

    def is_own(self, claim: Claim | None) -> bool:
        """Returns whether a claim belongs to this generation."""
        return claim is not None and claim.generation == self._lease.generation

    # -- settling ------------------------------------------------------------------------------

    def settle(self) -> SettleReport:
        """Settles the generation, or resumes an interrupted settlement."""
        files, now = self.files, self._custodian.now()
        settled, plan = files.settled(), files.plan()
        if settled is None:
            files.end_claims()
            self._at_once = files.decisions()
            late = now >= self.until()
            if not late:
                files.hold(now + self._lease.seconds, self._lease.owner)
            if plan is None:
                plan = files.begin(self._plan(*self._own_claims(extend=late)))
            settled = files.end(self._carry_out(plan))
        for name, (_, after, *_) in (plan or {"places": {}})["places"].items():
            self.claims.end(place_named(name), self._lease.generation, Claim.from_json(after))
        files.forget_soon(self.today)  # an interrupted settlement may not have got here
        return settled.report

    def _own_claims(self, *, extend: bool) -> tuple[dict[Place, Claim], list[str]]:
        """Returns the claims that the generation still holds, and errors on conflicting commits.

        :param extend: Whether to extend their lease first: it is over, and another run may take
            the partitions over at any moment.
        """
        until = self._custodian.now() + self._lease.seconds

        def extended(claim: Claim | None) -> Claim | None:
            if claim is None or not self.is_own(claim):
                return None
            return replace(claim, until=until) if extend else claim

        claims = {place: self.claims.change(place, extended) for place in self._places}
        own = {place: claim for place, claim in claims.items() if claim is not None}
        errors = []
        for place, committed in self._read_committed(own).items():
            error = self._conflict(place, committed, own[place], own[place].start)
            if error:
                errors.append(error)
                del own[place]
        return own, errors

    def _plan(self, own: Mapping[Place, Claim], errors: Iterable[str]) -> dict[str, Any]:
        """Computes the next state of each partition, and publishes copies of messages."""
        entries, others = self._collect_entries()
        sent, refused = self._send(entries, self._decide(own, entries), own)
        rows = {}
        for place, claim in own.items():
            at_once = self._at_once.get(place, {})
            decisions = keep_order(sent[place], at_once, self._producer.order)
            end = end_claim(claim, self._read_of(place, claim), decisions, at_once, others)
            counts = Counter(end.counts)
            stay = [offset for where, offset in refused if where == place]
            counts.subtract(CLASS_OF[decisions[offset].action] for offset in stay)
            counts["failed"] = len(stay)
            settled = (*end.after.settled, self._lease.generation)[-_KEPT_SETTLED:]
            after = replace(end.after, settled=settled).to_json()
            again = [end.again.all_but, sorted(end.again.ids)]
            rows[name_of(place)] = [claim.start, after, dict(counts), *again]
        return {"places": rows, "errors": [*errors, *dict.fromkeys(refused.values())]}

    def _collect_entries(self) -> tuple[_Entries, Action | None]:
        """Returns the entries of individual messages, each with its verdict.

        The whole manifest, which may be long, is read only where counts are not enough: where a
        message blocks those behind it, e.g. a dead letter that cannot be published.

        :returns: Also the action for all other messages: see :func:`.end_claim`.
        :raises ProducerError: If the other messages are unknown.
        """
        settlement, known = self._settlement, self._settlement.settled_now
        entries = _by_place(settlement.entries())
        expected = (settlement.expected or 0) + (0 if known is None else known.total)
        total = sum(read.messages or 0 for read in self.read.values())
        #: Whether manifest and lease name the same messages.
        agree = self.stopped and expected == total
        acked = settlement.rest.action is Action.ACK
        actions = {entry.verdict.action for named in entries.values() for entry in named.values()}
        actions |= {decision.action for decision in _flat(self._at_once)}
        ordered = self._producer.order != "none" and bool(actions - {Action.ACK})
        if acked and agree and not ordered:
            return entries, Action.ACK
        if settlement.everything is not None:
            for place, others in _by_place(settlement.everything()).items():
                named = entries.setdefault(place, {})
                for offset, entry in others.items():
                    named.setdefault(offset, entry._replace(verdict=settlement.rest))
            return entries, None if agree else Action.RELEASE
        if acked and not agree:
            raise ProducerError(
                f"generation {self._lease.generation} read {pluralize(total, 'message')} and its"
                f" manifest names {settlement.expected}: none was settled, and all are redelivered"
                " when the lease lapses"
            )
        return entries, Action.ACK if acked else Action.RELEASE

    def _decide(self, own: Mapping[Place, Claim], entries: _Entries) -> _Decisions:
        """Returns the decision on each entry of the claimed ranges."""
        now, decisions = self._custodian.now(), {}
        for place, claim in own.items():
            read, at_once = self._read_of(place, claim), self._at_once.get(place, {})
            named = {
                offset: _decision_of(entry, now)
                for offset, entry in entries.get(place, {}).items()
                if read.start <= offset < read.end and offset not in at_once
            }
            decisions[place] = keep_order(named, at_once, self._producer.order)
        return decisions

    def _read_of(self, place: Place, claim: Claim) -> Read:
        """Returns the range that was read; the claimed range if the source was not stopped."""
        return self.read[place] if self.stopped else Read(claim.start, claim.end)

    def _carry_out(self, plan: Mapping[str, Any]) -> SettleReport:
        """Commits the offsets of a plan, and returns the report."""
        rows = {place_named(name): row for name, row in plan["places"].items()}
        committed, owner = self._read_committed(rows), self.claims.owner()
        counts = Counter[str]()
        errors: list[str] = [*plan["errors"]]
        offsets: dict[Place, Committed] = {}
        done: dict[Place, Sequence[Any]] = {}
        for place, (start, value, place_counts, *again) in rows.items():
            claim, after = self.claims.read(place), Claim.from_json(value)
            if claim is not None and self.is_own(claim):
                current = committed.get(place)
                error = self._conflict(place, current, claim, start, after.start) if current else ""
                if error:
                    errors.append(error)
                    continue
                if current is None and not self._backfill and self._find_replaced({place: claim}):
                    errors.append(
                        f"the topic {place[0]!r} was created again while a run held messages of"
                        f" {name_of(place)}: they are settled, and no offset is committed"
                    )
                else:
                    offsets[place] = Committed.of(after, owner)
            elif claim is None or self._lease.generation not in claim.settled:
                continue
            done[place] = again
            counts.update(place_counts)
        halted = counts["left"]
        if self._backfill:  # only clearing the run redelivers these messages
            unread = bool(self._lease.state.get("unread"))
            halted += counts["requeued"] + unread
            errors += ["the interval was not read to its end: clear the run to go on"] * unread
        else:
            self._custodian.cluster.commit(offsets)
        lost = [place for place in self._places if place not in done]
        lapsed = sum(map(self._count_messages, lost))
        report = SettleReport.from_json(
            {**counts, "lapsed": lapsed, "halted": halted, "errors": errors}
        )
        report += beyond(report_of(d.action for d in _flat(self._at_once)), self._settlement)
        return replace(report, again=self._find_redelivered(done, lost))

    def _count_messages(self, place: Place) -> int:
        """Counts the messages delivered to the pipeline, without those settled immediately."""
        read = self.read.get(place)
        return max(0, (read.messages or 0 if read else 0) - len(self._at_once.get(place, {})))

    def _find_redelivered(
        self, done: Mapping[Place, Sequence[Any]], lost: Sequence[Place]
    ) -> ComingAgain:
        """Returns the messages that are redelivered.

        :param done: By partition: the two fields of a :class:`.ComingAgain`.
        :param lost: Partitions whose claim was lost.
        """
        everything = self._settlement.everything
        all_but = any(flag for flag, _ in done.values()) or bool(lost and everything is None)
        ids = {i for flag, row in done.values() if flag is all_but for i in row}
        at_once = _flat(self._at_once)
        final = {decision.message_id for decision in at_once if decision.action not in COMES_AGAIN}
        if all_but:
            return ComingAgain(frozenset(ids | final), all_but=True)
        named = _by_place(everything()) if lost and everything is not None else {}
        ids |= {entry.message_id for p in lost for entry in named.get(p, {}).values()}
        ids |= {decision.message_id for decision in at_once}
        return ComingAgain(frozenset(ids - final))

    def _read_committed(self, places: Iterable[Place]) -> dict[Place, Committed]:
        """Returns the group's committed offsets; a backfill has none in Kafka."""
        return {} if self._backfill else self._custodian.cluster.committed(list(places))

    def _conflict(self, place: Place, committed: Committed, claim: Claim, *offsets: int) -> str:
        """Abandons a claim if another consumer has changed the committed offset.

        :param offsets: The committed offsets that the claim expects.
        :returns: The text of an error; ``""`` if there is no conflict.
        """
        group = self._producer.group_id
        if committed.owner not in ("", self.claims.owner()):
            text = (
                f"a run with another staging folder (mark {committed.owner!r}) has taken over"
                f" {name_of(place)} in the group {group!r}: nothing of it is committed"
            )
        elif committed.offset not in offsets and committed.owner:
            text = (
                f"the offset of {name_of(place)} in the group {group!r} went from {offsets[0]} to"
                f" {committed.offset} by a late commit of an earlier run while this one held its"
                " messages: nothing is committed, and they are redelivered"
            )
        elif committed.offset not in offsets:
            text = (
                f"the offset of {name_of(place)} in the group {group!r} was reset from"
                f" {offsets[0]} to {committed.offset} while a run held its messages: the reset"
                " counts, and nothing is committed"
            )
        else:
            return ""
        self.claims.end(place, claim.generation, claim.freed(marked=claim.high))
        return text

    # -- copies --------------------------------------------------------------------------------

    def _send(
        self, entries: _Entries, decisions: _Decisions, own: Mapping[Place, Claim]
    ) -> tuple[dict[Place, dict[int, Decision]], dict[tuple[Place, int], str]]:
        """Publishes messages to the retry topic and to the dead-letter topic.

        The messages are recorded before the records of other settlements are read.  So a resumed
        settlement knows them, and of two concurrent settlements at least one sees the other.

        :returns: The updated decisions, and the error text of each message that could not be
            published and stays in its topic.
        """
        copies: dict[Place, dict[int, CopyRequest]] = {}
        for place, by_offset in decisions.items():
            claim, copied = own[place], place[0] in self._producer.retry_topics
            for offset, decision in by_offset.items():
                retried = decision.action is Action.RETRY and self._has_retries
                if retried or decision.action is Action.DEAD_LETTER:
                    maybe_sent = copied or offset < claim.marked or offset in claim.failed
                    not_before = decision.not_before if retried else None
                    request = CopyRequest(entries[place][offset], maybe_sent, not_before)
                    copies.setdefault(place, {})[offset] = request
        sent = {place: dict(by_offset) for place, by_offset in decisions.items()}
        if not copies:
            return sent, {}
        rows = [[*place, offset] for place, requests in copies.items() for offset in requests]
        name = self.files.append("letters", rows)
        for topic, partition, offset in self.files.rows("letters", but=name):
            requests = copies.get((topic, partition), {})
            if offset in requests:
                requests[offset] = requests[offset]._replace(maybe_sent=True)
        cluster, pipeline = self._custodian.cluster, self._custodian.env.pipeline
        outbox = Outbox(cluster, self._producer, pipeline, self._lease.generation)
        refused = outbox.send(copies, self._find_replaced({place: own[place] for place in copies}))
        for place, requests in copies.items():
            for offset in requests:
                decision = sent[place][offset]
                if (place, offset) not in refused:
                    sent[place][offset] = decision._replace(moved=True)
                elif decision.action is Action.DEAD_LETTER:
                    sent[place][offset] = decision._replace(action=Action.LEAVE)
        return sent, refused

    def _find_replaced(self, own: Mapping[Place, Claim]) -> set[Place]:
        """Returns the partitions that were deleted and created again, as far as is known."""
        cluster = self._custodian.cluster
        known = {topic: claim.topic_id for (topic, _), claim in own.items() if claim.topic_id}
        ids = cluster.topic_ids(known) if known else {}
        other = {topic for topic, topic_id in ids.items() if topic_id != known[topic]}
        return {p for p, c in own.items() if p[0] in other or cluster.ends(p)[1] < c.end}

    # -- immediately ---------------------------------------------------------------------------

    def settle_now(self, named: Mapping[str, Entry]) -> SettleReport:
        """Settles some messages while the others are still in progress."""
        self._at_once = self.files.decisions()
        entries = _by_place(named.values())
        claims = {place: self.claims.read(place) for place in entries}
        own = {p: claim for p, claim in claims.items() if claim and self.is_own(claim)}
        sent, refused = self._send(entries, self._decide(own, entries), own)
        for place, offset in refused:
            del sent[place][offset]
        self.files.note_decisions(sent)
        settled = [*_flat(self._at_once), *_flat(sent)]
        done = {d.message_id: d.action for d in settled if d.message_id in named}
        undone = frozenset(named.keys() - done.keys())
        report = report_of(done.values(), failed=len(refused), errors=refused.values())
        return report + SettleReport(
            lapsed=len(undone) - len(refused), undone=undone, halted=report.left
        )


def _by_place(entries: Iterable[Entry]) -> _Entries:
    """Groups entries by the partition and offset that their messages were read from.

    The receipt of a message from the retry topic names those of the copy.  Entries without a Kafka
    message id are dropped: no lease holds such a message.
    """
    by_place: _Entries = {}
    for entry in entries:
        try:
            topic, partition, offset = place_of(entry.receipt.partition("@")[2] or entry.message_id)
        except ValueError:
            continue
        by_place.setdefault((topic, partition), {})[offset] = entry
    return by_place


def _flat(decisions: _Decisions) -> list[Decision]:
    """Returns the decisions on all partitions as one list."""
    return [decision for by_offset in decisions.values() for decision in by_offset.values()]


def _decision_of(entry: Entry, now: float) -> Decision:
    """Converts an entry to a decision."""
    verdict, group = entry.verdict, entry.receipt.partition("@")[0]
    return Decision(verdict.action, now + verdict.delay, entry.attempt, group, entry.message_id)
