"""Determines the start offset of a run in each partition, or the reason to refuse the run.

The committed offset in Kafka is authoritative.  The newest claim in staging adds the run that holds
the partition, the messages that were delivered before, and the messages to be retried.  The two may
disagree: a settlement was interrupted, an operator reset the group, offsets or messages expired, or
the topic was deleted and created again.  This module detects each case, and honours or refuses it.

The offset's metadata contains a *mark*: the staging folder that committed it, the end of the
claimed range, and the lease deadline of the run that holds the partition.  Runs with another
staging folder, or with one that was lost or restored, rely on the mark.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, NamedTuple

from airflow_broadway.core.custody.findings import Finding, Level
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import pluralize
from airflow_broadway.producers.kafka.claims import Claims, Committed, Place, name_of, places_of
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.options import KafkaOptions, reset_timestamp
from airflow_broadway.producers.kafka.settling import Claim, Ranges, count, minus, take_over
from airflow_broadway.producers.kit.state_files import digest, timestamp_of

log = logging.getLogger(__name__)

#: The option that makes a topic unnecessary, by kind of topic.
_ALTERNATIVES: Final = {
    "retry": "give the producer order='partition' or another on_failure",
    "dead-letter": "give the producer RetryPolicy(dead_letter=False)",
}


class View(NamedTuple):
    """The state of a partition before a run reads it.

    :param state: The start offset, and the delivered, settled and failed offsets, as a claim
        without a generation.
    :param end: The log end offset.
    :param known: The newest claim in staging; ``None``: there is none.
    :param held_until: The lease deadline of the run that holds it; 0: the partition is free.
    :param expired: Messages that retention removed before they were read.
    :param committed: The committed offset and its mark; ``None``: there is none.
    :param begins: Whether the start offset is still to be committed: the group has none, or was
        reset.
    """

    state: Claim
    end: int
    known: Claim | None = None
    held_until: float = 0.0
    expired: int = 0
    committed: Committed | None = None
    begins: bool = False


def last_of(claims: Claims, claim: Claim, place: Place) -> Claim:
    """Returns the state of a partition whose claim has lapsed.

    The plan of an interrupted settlement is applied; else the decisions that callbacks carried out
    immediately.
    """
    if not claim.generation:
        return claim
    dead = claims.generation(claim.generation)
    return dead.planned(place) or take_over(claim, dead.decisions().get(place, {}))


def _is_of_other_log(claim: Claim, topic_id: str, end: int) -> bool:
    """Returns whether the topic was created again since the claim, as far as is known."""
    return bool(claim.topic_id and topic_id and claim.topic_id != topic_id) or claim.high > end


def missing_topics(
    producer: KafkaOptions, cluster: Cluster, partitions: Container[str]
) -> list[str]:
    """Returns an error text for each topic that does not exist."""
    return [
        f"the topic {topic!r} does not exist {cluster.where}, or Describe on it is not allowed:"
        " create it, or check the option topics"
        for topic in producer.topics
        if topic not in partitions
    ]


def expired_text(place: Place, gaps: Ranges) -> tuple[str, int]:
    """Returns an error text on messages that retention has removed, and their number."""
    number = count(gaps)
    if not number:
        return "", 0
    verb, clause = ("was", "it was") if number == 1 else ("were", "they were")
    text = (
        f"{pluralize(number, 'message')} of {name_of(place)} ({gaps[0][0]}–{gaps[-1][1] - 1})"
        f" {verb} removed by retention before {clause} read: let runs come more often, or the topic"
        " keep messages for longer; on_expired='continue' goes on behind them"
    )
    return text, number


def truncated_text(place: Place, offset: int, end: int) -> str:
    """Returns an error text on an offset beyond the end of the log."""
    return (
        f"offset {offset} of {name_of(place)} is beyond the end {end}: the topic was created"
        " again, or lost its tail; kafka-consumer-groups --reset-offsets starts over"
    )


@dataclass
class Opening:
    """Determines the start offsets of a group's partitions.

    :param partitions: Topic → partitions, of all topics of the producer and their retry topics.
    :param write: Whether a run begins; otherwise nothing is written or logged.
    """

    producer: KafkaOptions
    env: ProducerEnv
    cluster: Cluster
    claims: Claims
    partitions: Mapping[str, Sequence[int]]
    write: bool = True

    def __post_init__(self) -> None:
        self._all = places_of(self.partitions)
        self._ids: Mapping[str, str] | None = None
        self.owner = self.claims.owner(write=self.write)
        self._findings: list[Finding] = []
        #: The group's committed offsets, with their marks.
        self._committed: Mapping[Place, Committed] = {}

    # -- the group -----------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        """Checks the topics and the group."""
        errors = missing_topics(self.producer, self.cluster, self.partitions)
        errors += self._check_other_topics()
        members = self.cluster.members(self.producer.group_id)
        if members:
            shown = ", ".join(members[:3]) + (", …" if len(members) > 3 else "")
            errors.append(
                f"the group {self.producer.group_id!r} has {pluralize(len(members), 'member')}"
                f" ({shown}), which consume next to this pipeline: stop them, or give this"
                " pipeline a group_id of its own"
            )
        unknown = "whether the group has members could not be asked"
        notes = [Finding("note", unknown)] if members is None else []
        return [*(Finding("error", text) for text in errors), *notes]

    def _check_other_topics(self) -> list[str]:
        """Checks the retry and dead-letter topics."""
        producer, outcomes, where = self.producer, self.producer.outcomes(), self.cluster.where
        #: Topic → its kind, the option that names another, and whether it exists.
        copies: dict[str, tuple[str, str, bool]] = {}
        if Action.RETRY in outcomes and producer.order == "none":
            for topic in sorted(producer.retry_topics):
                copies[topic] = "retry", "retry_topic", topic in self.partitions
        if Action.DEAD_LETTER in outcomes:
            for topic in producer.dead_letter_topics:
                copies[topic] = "dead-letter", "dead_letter", bool(self.cluster.partitions(topic))
        policies = self.cluster.cleanup_policies(copies) if copies else {}
        errors = []
        for topic, (kind, option, exists) in copies.items():
            policy = policies.get(topic, "")
            if not exists:
                errors.append(
                    f"the {kind} topic {topic!r} does not exist {where}, or Describe on it is not"
                    f" allowed: create it, name another by {option}=…, or {_ALTERNATIVES[kind]}"
                )
            elif "compact" in policy:
                errors.append(
                    f"the {kind} topic {topic!r} {where} is compacted (cleanup.policy={policy}): of"
                    " all messages with one key it would keep the last; set its cleanup.policy to"
                    f" delete, or name another by {option}=…"
                )
        return errors

    # -- partitions ----------------------------------------------------------------------------

    def look(self, places: Sequence[Place]) -> tuple[dict[Place, View], list[Finding]]:
        """Determines the current state of partitions.

        :returns: The findings too; an error among them refuses the run.
        """
        if self._ids is None:
            self._ids = self.cluster.topic_ids(self.partitions)
        self._findings = []
        self._committed = self.cluster.committed(self._all)
        views = {place: self._look(place) for place in places}
        return views, list(dict.fromkeys(self._findings))

    def _look(self, place: Place) -> View:
        known, committed = self.claims.read(place), self._committed.get(place)
        low, end = self.cluster.ends(place)
        marked = max(known.high if known else 0, committed.high if committed else 0)
        held_until = self._held_until(place, known, committed)
        if held_until:
            start, done = committed.offset if committed else 0, known.done if known else ()
            state = Claim(start=start, marked=marked, done=done)
            return View(state, end, known, held_until, 0, committed)
        last = None if known is None else last_of(self.claims, known, place)
        if known is not None and last is not None and known.end > known.start:
            self._report(
                "note" if known.generation in last.settled else "warning",
                f"Generation {known.generation} held messages of {name_of(place)} and its lease is"
                " over: its unfinished messages are redelivered, marked.",
            )
        topic_id = (self._ids or {}).get(place[0], "")
        marked_by = committed.owner if committed else ""
        recreated = known is not None and not marked_by and _is_of_other_log(known, topic_id, end)
        settled = committed
        if last and known and committed and committed.offset == known.start and not recreated:
            settled = committed._replace(offset=last.start)
        base, reset = self._base(place, last, settled, low)
        # A commit by another program since then is a reset, even to the same offset.
        reset = reset or (recreated and committed is not None)
        state = Claim(start=base) if last is None or reset else last
        state = state.freed(start=base, marked=marked, topic_id=topic_id)
        view = View(state, end, known, committed=committed, begins=committed is None or reset)
        return self._check_log(place, view, low, reset=reset)

    def _held_until(self, place: Place, claim: Claim | None, committed: Committed | None) -> float:
        now = self.env.clock.now().timestamp()
        until = self.claims.held_until(claim, now)
        if claim is not None and until:
            run = self.claims.generation(claim.generation).run()
            self._report(
                "note",
                f"{name_of(place)} is held until {_iso(until)} by"
                f" {run or f'generation {claim.generation}'}: other runs leave it alone.",
            )
            return until
        if committed is None or committed.owner == self.owner or now >= committed.until:
            return 0.0
        self._report(
            "warning",
            f"{name_of(place)} is held until {_iso(committed.until)} by a run with another staging"
            f" folder (mark {committed.owner!r}), which reads in the group"
            f" {self.producer.group_id!r} too: a group_id of its own for each pipeline keeps them"
            " apart",
        )
        return committed.until

    def _base(
        self, place: Place, claim: Claim | None, committed: Committed | None, low: int
    ) -> tuple[int, bool]:
        """Returns the first unsettled offset, and whether the group was reset to it."""
        group = self.producer.group_id
        if claim is None:
            if committed is not None:
                return committed.offset, False
            start = self._start(place)
            return (low if start is None else start), False
        if committed is None:
            self._report(
                "warning",
                f"The group {group!r} has no offset for {name_of(place)} any more (it expired, or"
                f" was deleted): the claim in staging stands, at {claim.start}.",
            )
            return claim.start, False
        if committed.offset == claim.start:
            return claim.start, False
        is_own = committed.owner == self.owner != ""
        if is_own and committed.offset > claim.start:
            text = (
                f"The offset of {name_of(place)} in Kafka is {committed.offset}, and staging knows"
                f" of {claim.start}: it is older, or was restored.  The offset in Kafka counts."
            )
        else:
            how, cause = "was reset", "by another program"
            if is_own:
                how, cause = "went back", "by a commit of an earlier run that came late"
            text = (
                f"The offset of {name_of(place)} in the group {group!r} {how} from {claim.start} to"
                f" {committed.offset} {cause}: it is honoured."
            )
        self._report("warning", text)
        return committed.offset, True

    def _start(self, place: Place) -> int | None:
        """Returns the start offset of a new group; ``None``: only the partition is new.

        Of several sources that start together, one decides for all partitions.
        """
        starts = self.claims.starts()
        if starts is None:
            if self._committed or any(self.claims.read(place) is not None for place in self._all):
                return None
            starts = self._starts_by_policy()
            if self.write:
                starts = self.claims.start_at(starts)
        return starts.get(place)

    def _starts_by_policy(self) -> dict[Place, int]:
        """Returns the offsets by ``offset_reset_policy``; a retry topic starts at its beginning."""
        policy = self.producer.offset_reset_policy
        ends = {place: self.cluster.ends(place) for place in self._all}
        timestamp = reset_timestamp(policy)
        if timestamp is None:
            starts = {
                place: low if policy == "earliest" else end for place, (low, end) in ends.items()
            }
        else:
            # A timestamp after all messages means the end, as in Broadway.
            at = self.cluster.at_timestamp(self._all, timestamp.timestamp())
            starts = {place: o if o >= 0 else ends[place][1] for place, o in at.items()}
        retries = {p: low for p, (low, _) in ends.items() if p[0] in self.producer.retry_topics}
        return starts | retries

    def _check_log(self, place: Place, view: View, low: int, *, reset: bool) -> View:
        """Checks a view against the log: the same topic, with the expected offsets."""
        state, end = view.state, view.end
        known_id = "" if view.known is None or reset else view.known.topic_id
        if known_id and state.topic_id and known_id != state.topic_id:
            self._report(
                "error",
                f"the topic {place[0]!r} was created again since the group"
                f" {self.producer.group_id!r} read it: what was finished there says nothing of"
                " what is there now; kafka-consumer-groups --reset-offsets starts over",
            )
        elif state.start > end or (state.marked > end and not reset):
            self._report("error", truncated_text(place, max(state.start, state.marked), end))
        view = view._replace(state=replace(state, marked=min(state.marked, end)))
        if low <= state.start:
            return view
        text, expired = expired_text(place, minus(((state.start, low),), state.done))
        if expired and self.producer.on_expired == "fail":
            self._report("error", text)
        elif expired:
            self._report_loss(text)
        for offset in state.failed:
            if offset < low:
                self._report_loss(f"{name_of(place)}-{offset} was deleted before it was retried.")
        return view._replace(state=replace(view.state, start=low), expired=expired)

    def _report_loss(self, text: str) -> None:
        """Reports lost messages: as an error in the log of a run, which starts all the same."""
        if self.write:
            log.error("%s", text)
        else:
            self._report("warning", text)

    def _report(self, level: Level, text: str) -> None:
        self._findings.append(Finding(level, text))


def folder_of(run_id: str) -> str:
    """Returns the folder of a backfill's claims."""
    return f"backfill/{digest(run_id)}"


def interval_of(env: ProducerEnv) -> tuple[datetime, datetime]:
    """Returns the interval of a backfill.

    :raises ProducerError: If it has not ended yet.
    """
    assert env.interval is not None
    start, end = env.interval
    if end > env.clock.now():
        raise ProducerError(
            f"the interval from {start.isoformat()} to {end.isoformat()} is not over yet: what"
            " is still to be sent belongs to it; run the backfill later"
        )
    return start, end


def bounds_of(
    producer: KafkaOptions, env: ProducerEnv, cluster: Cluster, places: Sequence[Place]
) -> dict[Place, Claim]:
    """Returns the start and end offsets of the interval in unread partitions."""
    start, end = interval_of(env)
    first = cluster.at_timestamp(places, start.timestamp())
    last = cluster.at_timestamp(places, end.timestamp() + producer.lateness)
    bounds: dict[Place, Claim] = {}
    for place in places:
        low, high = cluster.ends(place)
        # -1: no message has such a late timestamp.
        base = first[place] if first[place] >= 0 else high
        limit = last[place] if last[place] >= 0 else high
        if base == low > 0:
            log.warning(
                "%s-%d begins at %d, within the interval or at its edge: what retention has"
                " removed of it is not read.",
                *place,
                low,
            )
        bounds[place] = Claim(start=base, limit=max(base, limit))
    return bounds


class BackfillOpening(Opening):
    """Determines the start offsets of a backfill, which reads an interval next to live runs.

    A backfill has separate claims, and does not change the group's committed offsets.  The log is
    in order of arrival, and producers' timestamps may be out of order.  So a backfill reads for
    ``lateness`` beyond the interval, and delivers the messages with a timestamp inside it.
    """

    def check(self) -> list[Finding]:
        """Refuses an interval that has not ended yet."""
        interval_of(self.env)
        return []

    def look(self, places: Sequence[Place]) -> tuple[dict[Place, View], list[Finding]]:
        """Determines the current state of partitions.

        The bounds of the interval are recorded once, so that a cleared run reads the same offsets.
        """
        unknown = [place for place in places if self.claims.read(place) is None]
        if unknown:
            for place, bound in bounds_of(self.producer, self.env, self.cluster, unknown).items():
                self.claims.change(place, lambda known, bound=bound: known or bound)  # type: ignore[misc]
        return {place: self._view_of(place) for place in places}, []

    def _view_of(self, place: Place) -> View:
        claim = self.claims.read(place)
        assert claim is not None
        held_until = self.claims.held_until(claim, self.env.clock.now().timestamp())
        last = claim if held_until else last_of(self.claims, claim, place)
        return View(last.freed(marked=claim.high), claim.limit, claim, held_until)


def _iso(seconds: float) -> str:
    return timestamp_of(seconds).isoformat(timespec="seconds")
