"""What a run finds before it receives: where it begins in each partition, or why it may not.

The group's offset in Kafka is the truth.  The newest claim in staging tells what else is known: a
run that holds the partition, messages that were handed out before, messages that wait to be
retried.  The two may disagree, because a settlement died half-way, an operator reset the group,
offsets or messages expired, or the topic was deleted and created again.  Each of these is
recognized here, and either honoured or refused.

Beside the offset stands a *mark*: the staging folder that committed it, the offset behind the last
message that was claimed, and until when a run holds the partition.  Another staging folder goes by
it, and so does one that was lost or restored.
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
from airflow_broadway.core.text import many
from airflow_broadway.producers.kafka.claims import Claims, Committed, Place, name_of, places_of
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.options import KafkaOptions, reset_timestamp
from airflow_broadway.producers.kafka.settling import Claim, Ranges, count, minus, take_over
from airflow_broadway.producers.kit.state_files import digest, instant_of

log = logging.getLogger(__name__)

#: How a pipeline does without a topic.
_OTHERWISE: Final = {
    "retry": "give the producer order='partition' or another on_failure",
    "dead-letter": "give the producer RetryPolicy(dead_letter=False)",
}


class View(NamedTuple):
    """A partition as a run finds it.

    :param state: Where it begins, what was handed out before, what is finished or waits: a claim of
        no generation.
    :param end: The offset behind the last.
    :param known: The newest claim in staging; ``None``: there is none.
    :param held_until: The end of the lease of the run that holds it; 0: none does.
    :param expired: Messages that retention removed before they were read.
    :param committed: What the group has committed; ``None``: nothing.
    :param begins: Whether the group has no such offset yet, or the claim does not know of it.
    """

    state: Claim
    end: int
    known: Claim | None = None
    held_until: float = 0.0
    expired: int = 0
    committed: Committed | None = None
    begins: bool = False


def last_of(claims: Claims, claim: Claim, place: Place) -> Claim:
    """Returns the state of a partition whose claim nobody holds any more.

    A settlement that was decided counts, though it died before it had ended the claim; so does what
    callbacks had settled immediately.
    """
    if not claim.generation:
        return claim
    dead = claims.generation(claim.generation)
    return dead.planned(place) or take_over(claim, dead.decisions().get(place, {}))


def _is_of_other_log(claim: Claim, topic_id: str, end: int) -> bool:
    """Whether the log is not the one that was claimed, as far as it can be told."""
    return bool(claim.topic_id and topic_id and claim.topic_id != topic_id) or claim.high > end


def missing_topics(
    producer: KafkaOptions, cluster: Cluster, partitions: Container[str]
) -> list[str]:
    """Returns a sentence for each topic that does not exist."""
    return [
        f"the topic {topic!r} does not exist {cluster.where}, or Describe on it is not allowed:"
        " create it, or check the option topics"
        for topic in producer.topics
        if topic not in partitions
    ]


def expired_text(place: Place, gone: Ranges) -> tuple[str, int]:
    """Returns a sentence on messages that retention has removed, and their number."""
    lost = count(gone)
    if not lost:
        return "", 0
    were, they_were = ("was", "it was") if lost == 1 else ("were", "they were")
    text = (
        f"{many(lost, 'message')} of {name_of(place)} ({gone[0][0]}–{gone[-1][1] - 1}) {were}"
        f" removed by retention before {they_were} read: let runs come more often, or the topic"
        " keep messages for longer; on_expired='continue' goes on behind them"
    )
    return text, lost


def truncated_text(place: Place, offset: int, end: int) -> str:
    """Returns a sentence on an offset that the log does not have yet, or not any more."""
    return (
        f"offset {offset} of {name_of(place)} is beyond the end {end}: the topic was made anew, or"
        " lost its tail; kafka-consumer-groups --reset-offsets starts over"
    )


@dataclass
class Opening:
    """Finds where the partitions of a group begin.

    :param partitions: Topic → partitions, of all topics of the producer and their retry topics.
    :param write: Whether a run begins; else nothing is written, nor logged.
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
        #: What the group has committed.
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
                f"the group {self.producer.group_id!r} has {many(len(members), 'member')}"
                f" ({shown}), which consume beside this pipeline: stop them, or give this pipeline"
                " a group_id of its own"
            )
        unknown = "whether the group has members could not be asked"
        notes = [Finding("note", unknown)] if members is None else []
        return [*(Finding("error", text) for text in errors), *notes]

    def _check_other_topics(self) -> list[str]:
        """Checks the topics that copies are sent to."""
        producer, outcomes, where = self.producer, self.producer.outcomes(), self.cluster.where
        #: Topic → what it holds, the option that names another, and whether it exists.
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
                    f" allowed: create it, name another by {option}=…, or {_OTHERWISE[kind]}"
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
        """Finds partitions as they are now.

        :returns: The findings too; with an error among them no run begins.
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
                " over: what it has not finished comes again, marked.",
            )
        topic_id = (self._ids or {}).get(place[0], "")
        marked_by = committed.owner if committed else ""
        anew = known is not None and not marked_by and _is_of_other_log(known, topic_id, end)
        settled = committed
        if last and known and committed and committed.offset == known.start and not anew:
            settled = committed._replace(offset=last.start)
        base, reset = self._base(place, last, settled, low)
        # Another program has committed since: a reset, though perhaps to the very same offset.
        reset = reset or (anew and committed is not None)
        state = Claim(start=base) if last is None or reset else last
        state = state.freed(start=base, marked=marked, topic_id=topic_id)
        view = View(state, end, known, committed=committed, begins=committed is None or reset)
        return self._checked(place, view, low, reset=reset)

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
        """Returns the first offset that is not finished, and whether the group was reset to it."""
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
            how, by = "was reset", "by another program"
            if is_own:
                how, by = "went back", "by a commit of an earlier run that came late"
            text = (
                f"The offset of {name_of(place)} in the group {group!r} {how} from {claim.start} to"
                f" {committed.offset} {by}: it is honoured."
            )
        self._report("warning", text)
        return committed.offset, True

    def _start(self, place: Place) -> int | None:
        """Returns where a new group begins in a partition; ``None``: the partition alone is new.

        Of several sources that begin together, one decides for all partitions.
        """
        starts = self.claims.starts()
        if starts is None:
            if self._committed or any(self.claims.read(place) is not None for place in self._all):
                return None
            starts = self._by_policy()
            if self.write:
                starts = self.claims.start_at(starts)
        return starts.get(place)

    def _by_policy(self) -> dict[Place, int]:
        """Returns where ``offset_reset_policy`` begins; a retry topic begins at its beginning."""
        policy = self.producer.offset_reset_policy
        ends = {place: self.cluster.ends(place) for place in self._all}
        timestamp = reset_timestamp(policy)
        if timestamp is None:
            starts = {
                place: low if policy == "earliest" else end for place, (low, end) in ends.items()
            }
        else:
            # Behind all messages it begins at the end, as Broadway does.
            at = self.cluster.at_timestamp(self._all, timestamp.timestamp())
            starts = {place: o if o >= 0 else ends[place][1] for place, o in at.items()}
        retries = {p: low for p, (low, _) in ends.items() if p[0] in self.producer.retry_topics}
        return starts | retries

    def _checked(self, place: Place, view: View, low: int, *, reset: bool) -> View:
        """Compares a view with the log: whether it is the same topic, and has what is expected."""
        state, end = view.state, view.end
        known_id = "" if view.known is None or reset else view.known.topic_id
        if known_id and state.topic_id and known_id != state.topic_id:
            self._report(
                "error",
                f"the topic {place[0]!r} was made anew since the group"
                f" {self.producer.group_id!r} read it: what was finished there says nothing of"
                " what is there now; kafka-consumer-groups --reset-offsets starts over",
            )
        elif state.start > end or (state.marked > end and not reset):
            self._report("error", truncated_text(place, max(state.start, state.marked), end))
        view = view._replace(state=replace(state, marked=min(state.marked, end)))
        if low <= state.start:
            return view
        text, lost = expired_text(place, minus(((state.start, low),), state.done))
        if lost and self.producer.on_expired == "fail":
            self._report("error", text)
        elif lost:
            self._report_loss(text)
        for offset in state.failed:
            if offset < low:
                self._report_loss(f"{name_of(place)}-{offset} was to be retried, and is gone.")
        return view._replace(state=replace(view.state, start=low), expired=lost)

    def _report_loss(self, text: str) -> None:
        """Reports messages that are gone: an error in a run's log, though the run begins."""
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

    :raises ProducerError: If it is not over yet.
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
    """Returns where the interval begins and ends in partitions of which nothing was read."""
    start, end = interval_of(env)
    first = cluster.at_timestamp(places, start.timestamp())
    last = cluster.at_timestamp(places, end.timestamp() + producer.lateness)
    bounds: dict[Place, Claim] = {}
    for place in places:
        low, high = cluster.ends(place)
        # -1: no message is as late as that.
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
    """Finds where the partitions of a backfill begin: messages of an interval, next to live runs.

    It has claims of its own, whose offsets are those of the run; the group is not touched.
    Messages are in the log in order of their arrival, and the timestamps that their senders gave
    them need not be in that order: so it reads on for ``lateness`` behind the interval, and hands
    out those messages whose timestamp is in it.
    """

    def check(self) -> list[Finding]:
        """Refuses an interval that is not over yet."""
        interval_of(self.env)
        return []

    def look(self, places: Sequence[Place]) -> tuple[dict[Place, View], list[Finding]]:
        """Finds partitions as they are now.

        Where an interval begins and ends is recorded once, so that a run that is cleared reads the
        same.
        """
        unknown = [place for place in places if self.claims.read(place) is None]
        if unknown:
            bounds = bounds_of(self.producer, self.env, self.cluster, unknown)
            for place, bound in bounds.items():
                self.claims.change(place, lambda known, bound=bound: known or bound)  # type: ignore[misc]
        return {place: self._found(place) for place in places}, []

    def _found(self, place: Place) -> View:
        claim = self.claims.read(place)
        assert claim is not None
        held_until = self.claims.held_until(claim, self.env.clock.now().timestamp())
        last = claim if held_until else last_of(self.claims, claim, place)
        return View(last.freed(marked=claim.high), claim.limit, claim, held_until)


def _iso(seconds: float) -> str:
    return instant_of(seconds).isoformat(timespec="seconds")
