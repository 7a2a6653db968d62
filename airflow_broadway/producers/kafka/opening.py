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

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from airflow_broadway.core.custody.findings import Finding, Level
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.text import many
from airflow_broadway.producers.kafka.claims import (
    Claim,
    Claims,
    Failed,
    Place,
)
from airflow_broadway.producers.kafka.client import Cluster, Committed
from airflow_broadway.producers.kafka.offsets import Ranges, count, minus
from airflow_broadway.producers.kafka.options import KafkaOptions, reset_instant
from airflow_broadway.producers.kafka.settling import taken_over

if TYPE_CHECKING:
    from airflow_broadway.core.clock import Clock

_VERSION: Final = 2


class Mark(NamedTuple):
    """Describes what stands beside an offset that this package committed.

    :param owner: The staging folder.
    :param high: The offset behind the last that was claimed.
    :param until: The end of the claim's lease; 0: nobody holds the partition.
    """

    owner: str
    high: int
    until: float


class View(NamedTuple):
    """A partition as a run finds it.

    :param base: The first offset that is not finished.
    :param marked: Messages below it were handed out before.
    :param claim: The newest claim; ``None``: there was none.
    :param settled: The generations whose settlement is in it.
    :param done: Offsets beyond the base that are finished.
    :param failed: Offsets that wait to be retried.
    :param held_until: The end of the lease of the run that holds it; 0: none does.
    :param expired: Messages that retention removed before they were read.
    :param limit: The end of a backfill; -1: none.
    :param committed: What the group has committed; ``None``: nothing.
    :param begins: Whether the group has no such offset yet, or the claim does not know of it.
    """

    base: int
    marked: int
    end: int
    claim: Claim | None
    topic_id: str = ""
    settled: tuple[str, ...] = ()
    done: Ranges = ()
    failed: Mapping[int, Failed] = MappingProxyType({})
    held_until: float = 0.0
    expired: int = 0
    limit: int = -1
    committed: Committed | None = None
    begins: bool = False


def last_of(claims: Claims, claim: Claim, place: Place) -> Claim:
    """Returns what a claim has come to that nobody holds any more.

    A settlement that was decided counts, though it died before it had ended the claim; so does what
    callbacks had settled immediately.
    """
    if not claim.generation:
        return claim
    dead = claims.generation(claim.generation)
    planned = dead.planned(place)
    if planned is not None:
        return planned
    done, failed = taken_over(claim, dead.now().get(place, {}))
    return replace(claim, done=done, failed=failed)


def commit_of(claim: Claim, owner: str, *, durable: bool = True) -> Committed:
    """Returns the commit of a claim's start, with its mark."""
    about = {"b": _VERSION, "o": owner, "h": claim.high}
    if claim.generation and durable:
        about["u"] = round(claim.until)
    return Committed(claim.start, json.dumps(about, separators=(",", ":")))


def read_mark(metadata: str) -> Mark | None:
    """Reads the mark in an offset's metadata; ``None`` if another program committed it."""
    if not metadata.startswith("{"):
        return None
    try:
        value = json.loads(metadata)
        if value["b"] != _VERSION:
            return None
        return Mark(str(value["o"]), int(value["h"]), float(value.get("u", 0)))
    except (ValueError, KeyError, TypeError):
        return None


def own_places(
    partitions: Mapping[str, Sequence[int]], index: int, concurrency: int
) -> list[Place]:
    """Returns the partitions of one of several sources: every n-th."""
    places = sorted((topic, number) for topic, found in partitions.items() for number in found)
    return places[index::concurrency]


def missing_topics(
    producer: KafkaOptions, cluster: Cluster, partitions: Mapping[str, Sequence[int]]
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
    one = lost == 1
    text = (
        f"{many(lost, 'message')} of {name_of(place)} ({gone[0][0]}–{gone[-1][1] - 1})"
        f" {'was' if one else 'were'} removed by retention before"
        f" {'it was' if one else 'they were'} read: let runs come more often, or the topic keep"
        " messages for longer; on_expired='continue' goes on behind them"
    )
    return text, lost


def truncated_text(place: Place, offset: int, end: int) -> str:
    """Returns a sentence on an offset that the log does not have yet, or not any more."""
    return (
        f"offset {offset} of {name_of(place)} is beyond the end {end}: the topic was made anew, or"
        " lost its tail; kafka-consumer-groups --reset-offsets starts over"
    )


class Opening:
    """Finds where the partitions of a group begin.

    :param partitions: Topic → partitions, of all topics of the producer and their retry topics.
    :param write: Whether to write down where a new group begins; else nothing is changed.
    """

    def __init__(
        self,
        producer: KafkaOptions,
        cluster: Cluster,
        claims: Claims,
        clock: Clock,
        partitions: Mapping[str, Sequence[int]],
        *,
        write: bool = True,
    ) -> None:
        self._producer = producer
        self._cluster = cluster
        self._claims = claims
        self._clock = clock
        self._partitions = partitions
        self._all = own_places(partitions, 0, 1)
        self._write = write
        self._ids: Mapping[str, str] | None = None
        self._retry_topics = {producer.retry_of(topic) for topic in producer.topics}
        #: Where this run begins with ``begin_offset="reset"``.
        self._begun: dict[Place, int] = {}
        self.owner = claims.owner(write=write)
        #: What was found since they were last taken.
        self.findings: list[Finding] = []
        #: The texts of those that tell of messages that are gone: errors in a run's log.
        self.losses: set[str] = set()

    # -- the group -----------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        """Checks the topics and the group."""
        found = [*missing_topics(self._producer, self._cluster, self._partitions)]
        found += self._check_topics()
        members = self._cluster.admin.members(self._producer.group_id)
        if members:
            shown = ", ".join(members[:3]) + (", …" if len(members) > 3 else "")
            found.append(
                f"the group {self._producer.group_id!r} has {many(len(members), 'member')}"
                f" ({shown}), which consume beside this pipeline: stop them, or give this pipeline"
                " a group_id of its own"
            )
        unknown = "whether the group has members could not be asked"
        notes = [Finding("note", unknown)] if members is None else []
        return [*(Finding("error", text) for text in found), *notes]

    def _check_topics(self) -> list[str]:
        producer, found = self._producer, []
        outcomes, where = producer.outcomes(), self._cluster.where
        #: Topics that copies are sent to, with what they hold, and the option that names another.
        places: dict[str, tuple[str, str]] = {}
        if Action.RETRY in outcomes and producer.order == "none":
            found += [
                f"the retry topic {topic!r} does not exist {where}, or Describe on it is not"
                " allowed: create it, name another by retry_topic=…, or give the producer"
                " order='partition' or another on_failure"
                for topic in sorted(self._retry_topics)
                if topic not in self._partitions
            ]
            places |= dict.fromkeys(self._retry_topics, ("retry", "retry_topic"))
        if Action.DEAD_LETTER in outcomes:
            letters = {producer.dead_letter_of(each) for each in producer.topics}
            found += [
                f"the dead-letter topic {topic!r} does not exist {where}: create it, name another"
                " by dead_letter=…, or give the producer RetryPolicy(dead_letter=False)"
                for topic in sorted(letters)
                if not self._cluster.has_topic(topic)
            ]
            places |= dict.fromkeys(letters, ("dead-letter", "dead_letter"))
        policies = self._cluster.admin.cleanup_policies(sorted(places)) if places else {}
        return found + [
            f"the {places[topic][0]} topic {topic!r} {where} is compacted"
            f" (cleanup.policy={policy}): of all messages with one key it would keep the last; set"
            f" its cleanup.policy to delete, or name another by {places[topic][1]}=…"
            for topic, policy in policies.items()
            if "compact" in policy
        ]

    # -- partitions ----------------------------------------------------------------------------

    def look(self, places: Sequence[Place]) -> dict[Place, View]:
        """Finds partitions as they are now.

        What people should know is in :attr:`findings`; with an error among them no run begins.
        """
        if self._ids is None:
            self._ids = self._cluster.admin.topic_ids(list(self._partitions))
        found = self._cluster.committed(self._all)
        return {place: self._look(place, found) for place in places}

    def _look(self, place: Place, found: Mapping[Place, Committed]) -> View:
        claim = self._claims.read(place)
        committed = found.get(place)
        mark = None if committed is None else read_mark(committed.metadata)
        low, end = self._cluster.ends(place)
        resets = self._producer.begin_offset == "reset" and place[0] not in self._retry_topics
        held_until = self._held_until(place, claim, mark)
        seen = committed
        marked = max(0 if claim is None else claim.high, 0 if mark is None else mark.high)
        if held_until:
            if resets:
                self._refuse(
                    f"begin_offset='reset' at {name_of(place)}, while another run holds messages of"
                    f" it until {_at(held_until)}: let that run end, or wait until then"
                )
            start = committed.offset if committed is not None else 0
            return View(start, marked, end, claim, held_until=held_until, committed=seen)
        last = None if claim is None else last_of(self._claims, claim, place)
        if claim is not None and claim.end > claim.start and last is not None:
            self._say(
                "note" if claim.generation in last.settled else "warning",
                f"Generation {claim.generation} held messages of {name_of(place)} and its lease is"
                " over: what it has not finished comes again, marked.",
            )
        anew = claim is not None and mark is None and self._is_anew(place, claim, end)
        if last and claim and committed and committed.offset == claim.start and not anew:
            committed = committed._replace(offset=last.start)
        if resets:
            if place not in self._begun:
                self._begun |= self._by_policy([place])
            base, reset = self._begun[place], True
        else:
            base, reset = self._base(place, last, committed, mark, found, low)
            # Another program has committed since: a reset, though perhaps to the very same offset.
            reset = reset or (anew and committed is not None)
        view = View(
            base,
            marked,
            end,
            claim,
            topic_id=(self._ids or {}).get(place[0], ""),
            committed=seen,
            begins=seen is None or reset,
        )
        if last is not None and not reset:
            view = view._replace(done=last.done, failed=last.failed, settled=last.settled)
        return self._checked(place, view, low, reset=reset)

    def _held_until(self, place: Place, claim: Claim | None, mark: Mark | None) -> float:
        now = self._clock.now().timestamp()
        holder = self._claims.holder(claim, now)
        if holder is not None:
            return holder[1]
        if mark is None or mark.owner == self.owner or now >= mark.until:
            return 0.0
        self._say(
            "warning",
            f"{name_of(place)} is held until {_at(mark.until)} by a run with another staging folder"
            f" (mark {mark.owner!r}), which reads in the group {self._producer.group_id!r} too: a"
            " group_id of its own for each pipeline keeps them apart",
        )
        return mark.until

    def _base(
        self,
        place: Place,
        claim: Claim | None,
        committed: Committed | None,
        mark: Mark | None,
        found: Mapping[Place, Committed],
        low: int,
    ) -> tuple[int, bool]:
        """Returns the first offset that is not finished, and whether the group was reset to it."""
        group = self._producer.group_id
        if claim is None:
            if committed is not None:
                return committed.offset, False
            start = self._start(place, found)
            return (low if start is None else start), False
        if committed is None:
            self._say(
                "warning",
                f"The group {group!r} has no offset for {name_of(place)} any more (it expired, or"
                f" was deleted): the claim in staging stands, at {claim.start}.",
            )
            return claim.start, False
        if committed.offset == claim.start:
            return claim.start, False
        if mark is not None and mark.owner == self.owner and committed.offset > claim.start:
            self._say(
                "warning",
                f"The offset of {name_of(place)} in Kafka is {committed.offset}, and staging knows"
                f" of {claim.start}: it is older, or was restored.  The offset in Kafka counts.",
            )
            return committed.offset, True
        how, by = "was reset", "by another program: it is honoured"
        if mark is not None and mark.owner == self.owner:
            how, by = "went back", "by a commit of an earlier run that came late: it is honoured"
        self._say(
            "warning",
            f"The offset of {name_of(place)} in the group {group!r} {how} from {claim.start} to"
            f" {committed.offset} {by}.",
        )
        return committed.offset, True

    def _start(self, place: Place, found: Mapping[Place, Committed]) -> int | None:
        """Returns where a new group begins in a partition; ``None``: the partition alone is new.

        Of several sources that begin together, one decides for all partitions.
        """
        starts = self._claims.starts()
        if starts is None:
            if found or any(self._claims.read(each) is not None for each in self._all):
                return None
            starts = self._by_policy(self._all)
            if self._write:
                starts = self._claims.start_at(starts)
        return starts.get(place)

    def _by_policy(self, places: Sequence[Place]) -> dict[Place, int]:
        """Returns where ``offset_reset_policy`` begins; a retry topic begins at its beginning."""
        policy = self._producer.offset_reset_policy
        instant = reset_instant(policy)
        ends = {place: self._cluster.ends(place) for place in places}
        earliest = {place: low for place, (low, _) in ends.items()}
        retried = {place: low for place, low in earliest.items() if place[0] in self._retry_topics}
        if policy == "earliest":
            return earliest
        if instant is None:
            return {place: end for place, (_, end) in ends.items()} | retried
        at = self._cluster.at_instants(places, instant.timestamp())
        # Behind all messages it begins at the end, as Broadway does.
        found = {place: offset if offset >= 0 else ends[place][1] for place, offset in at.items()}
        return found | retried

    def _is_anew(self, place: Place, claim: Claim, end: int) -> bool:
        """Whether the log is not the one that was claimed, as far as it can be told."""
        now = (self._ids or {}).get(place[0], "")
        return bool(claim.topic_id and now and claim.topic_id != now) or claim.high > end

    def _checked(self, place: Place, view: View, low: int, *, reset: bool) -> View:
        known = "" if view.claim is None or reset else view.claim.topic_id
        if known and view.topic_id and known != view.topic_id:
            self._refuse(
                f"the topic {place[0]!r} was made anew since the group"
                f" {self._producer.group_id!r} read it: what was finished there says nothing of"
                " what is there now; kafka-consumer-groups --reset-offsets starts over"
            )
        elif view.base > view.end or (view.marked > view.end and not reset):
            self._refuse(truncated_text(place, max(view.base, view.marked), view.end))
        view = view._replace(marked=min(view.marked, view.end))
        if low <= view.base:
            return view
        text, lost = expired_text(place, minus(((view.base, low),), view.done))
        if lost and self._producer.on_expired == "fail":
            self._refuse(text)
        elif lost:
            self._lost(text)
        for offset in view.failed:
            if offset < low:
                self._lost(f"{name_of(place)}-{offset} was to be retried, and is gone.")
        return view._replace(base=low, expired=lost)

    def _refuse(self, text: str) -> None:
        self._say("error", text)

    def _lost(self, text: str) -> None:
        self.losses.add(text)
        self._say("warning", text)

    def _say(self, level: Level, text: str) -> None:
        finding = Finding(level, text)
        if finding not in self.findings:
            self.findings.append(finding)


def name_of(place: Place) -> str:
    """Returns a partition's name, for people."""
    return f"{place[0]}-{place[1]}"


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
