"""The half that renews and settles, from any process: knows the lease, moves the group's offsets.

A settlement first sends copies to the retry topic and to the topic for dead letters, and waits
until they are confirmed.  Then it records its plan, which stands for every later settlement,
commits the offsets, records the report, and ends the claims.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import CLASS_OF, ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, RELEASE, Action
from airflow_broadway.producers.kafka import outbox
from airflow_broadway.producers.kafka.claims import (
    Claim,
    Claims,
    Decision,
    GenerationFiles,
    Place,
    group_files,
)
from airflow_broadway.producers.kafka.client import Cluster, Committed
from airflow_broadway.producers.kafka.opening import commit_of, name_of, read_mark
from airflow_broadway.producers.kafka.outbox import Why
from airflow_broadway.producers.kafka.settling import ended, in_order
from airflow_broadway.producers.kafka.work import Sorted, Work, decision_of, read_of, sort
from airflow_broadway.producers.kit.checks import check_lease
from airflow_broadway.producers.kit.reports import beyond, report_of

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka.options import KafkaOptions

log = logging.getLogger(__name__)

_UNREAD: Final = "the interval was not read to its end: clear the run to go on"
#: Generations whose settlement a claim remembers.
_KEPT_SETTLED: Final = 5


class KafkaCustodian:
    """Renews and settles the generations of one group."""

    def __init__(self, producer: KafkaOptions, env: ProducerEnv) -> None:
        self._producer, self._env, self._clock = producer, env, env.clock
        self._opened: Cluster | None = None

    # -- holding -------------------------------------------------------------------------------

    def renew(self, lease: Lease) -> Lease | None:
        claims = self._claims(lease)
        files = claims.generation(lease.generation)
        now = self._now()
        if files.ended() or now >= _until(lease, files):
            return None
        deadline = now + lease.seconds
        files.hold(deadline, lease.owner)
        # Only now, lest it was taken over before this was written.
        for place in read_of(lease):
            claim = claims.read(place)
            if claim is None or claim.generation != lease.generation:
                return None
        return replace(lease, deadline=datetime.fromtimestamp(deadline, timezone.utc))

    def holds(self, lease: Lease) -> bool:
        files = self._claims(lease).generation(lease.generation)
        return not files.ended() and self._now() < _until(lease, files)

    # -- settling ------------------------------------------------------------------------------

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        claims = self._claims(lease)
        files = claims.generation(lease.generation)
        if lease.state.get("stopped") and not lease.state.get("read"):
            if files.deadline() is not None:  # it was about to hold something
                files.forget_soon()
            # It never held anything.
            return SettleReport(lapsed=settlement.expected or 0, again=ComingAgain(all_but=True))
        settled, plan = files.log.settled(), files.plan()
        if settled is None:
            files.end()
            work = Work(self._producer, lease, settlement, files.now(), self._now())
            late = self._now() >= _until(lease, files)
            if not late:
                files.hold(self._now() + lease.seconds, lease.owner)
            if plan is None:
                held, errors = self._held(work, claims, lease.seconds if late else 0.0)
                plan = files.log.begin(self._planned(work, held, files, errors))
            settled = files.log.end(self._carried_out(work, claims, plan))
        for topic, partition, _, after, *_ in (plan or {}).get("places", ()):
            claims.end((topic, partition), lease.generation, Claim.from_json(after))
        files.forget_soon()  # an earlier settler may have died before it said so
        return settled.report

    def _held(
        self, work: Work, claims: Claims, again_for: float
    ) -> tuple[dict[Place, Claim], list[str]]:
        """Returns the claims that the generation still has, and sentences on what others changed.

        :param again_for: Seconds for which to hold them from now on: their lease is over, and
            another run may take them over at any moment.
        """
        found: dict[Place, Claim] = {}
        until = self._now() + again_for

        def mine(claim: Claim | None) -> Claim | None:
            if claim is None or claim.generation != work.generation:
                return None
            return replace(claim, until=until) if again_for else claim

        for place in work.places:
            claim = claims.change(place, mine)
            if claim is not None:
                found[place] = claim
        errors = []
        for place, each in self._committed(work, found).items():
            error = self._conflict(place, claims, each, found[place], found[place].start)
            if error:
                errors.append(error)
                del found[place]
        return found, errors

    def _planned(
        self,
        work: Work,
        held: Mapping[Place, Claim],
        files: GenerationFiles,
        errors: Iterable[str],
    ) -> dict[str, Any]:
        """Decides what becomes of each partition, and sends copies of messages."""
        work.read_entries()
        made = {place: work.decided(place, claim) for place, claim in held.items()}
        refused = self._send(work, work.entries, made, held, files)
        places = []
        for place, claim in held.items():
            stay = {offset for where, offset in refused if where == place}
            if stay and self._producer.order != "none":  # and with them what is behind them
                made[place] = work.decided(place, claim, stay)
            decisions = work.carried_out(made[place], stay)
            end = ended(
                claim, work.read(place, claim), decisions, work.at_once(place), work.rest(place)
            )
            counts = Counter(end.counts)
            for offset in stay:
                counts[CLASS_OF[decisions[offset].action]] -= 1
            counts["failed"] = len(stay)
            settled = (*end.after.settled, work.generation)[-_KEPT_SETTLED:]
            after = replace(end.after, settled=settled).to_json()
            again, final = end.again, end.final
            told = [None, sorted(final)] if again is None else [sorted(again), []]
            places.append([*place, claim.start, after, dict(counts), *told])
        return {"places": places, "errors": [*errors, *dict.fromkeys(refused.values())]}

    def _carried_out(self, work: Work, claims: Claims, plan: Mapping[str, Any]) -> SettleReport:
        """Commits the offsets of a plan, and returns its report."""
        found = self._committed(work, [(row[0], row[1]) for row in plan["places"]])
        owner = claims.owner()
        counts, at_once = Counter[str](), Counter[str]()
        errors: list[str] = [*plan["errors"]]
        offsets: dict[Place, Committed] = {}
        done: dict[Place, list[Any]] = {}
        for topic, partition, start, value, *about in plan["places"]:
            place, after = (topic, partition), Claim.from_json(value)
            claim = claims.read(place)
            if claim is not None and claim.generation == work.generation:
                each = found.get(place)
                own = start, after.start
                error = "" if each is None else self._conflict(place, claims, each, claim, *own)
                if error:
                    errors.append(error)
                    continue
                if each is None and not work.backfill and self._replaced({place: claim}):
                    errors.append(
                        f"the topic {topic!r} was made anew while a run held messages of"
                        f" {name_of(place)}: they are settled, and no offset is committed"
                    )
                else:
                    offsets[place] = commit_of(after, owner)
            elif claim is None or work.generation not in claim.settled:
                continue
            done[place] = about
            counts.update(about[0])
        lost = [place for place in work.places if place not in done]
        for place in work.places:
            at_once.update(CLASS_OF[each.action] for each in work.at_once(place).values())
        halted = counts["left"]
        if work.backfill:  # a backfill that is not cleared does not take them up
            halted += counts["requeued"] + work.unread
            errors += [_UNREAD] * work.unread
        else:
            self._cluster.commit(offsets)
        lapsed = sum(map(work.messages, lost))
        about = {**counts, "lapsed": lapsed, "halted": halted, "errors": errors}
        report = SettleReport.from_json(about)
        report += beyond(SettleReport.from_json(dict(at_once)), work.settlement)
        return replace(report, again=_coming_again(work, done, lost))

    def _committed(self, work: Work, places: Iterable[Place]) -> dict[Place, Committed]:
        """Reads the group's offsets; a backfill has none in Kafka."""
        return {} if work.backfill else self._cluster.committed(list(places))

    def _conflict(
        self, place: Place, claims: Claims, committed: Committed, claim: Claim, *own: int
    ) -> str:
        """Gives up a claim if its offset was changed by others.

        :param own: The offsets that are the claim's.
        :returns: A sentence on what was changed; ``""``: nothing.
        """
        group, mark = self._producer.group_id, read_mark(committed.metadata)
        if mark is not None and mark.owner != claims.owner():
            error = (
                f"a run with another staging folder (mark {mark.owner!r}) has taken over"
                f" {name_of(place)} in the group {group!r}: nothing of it is committed"
            )
        elif committed.offset not in own and mark is not None:
            error = (
                f"the offset of {name_of(place)} in the group {group!r} went from {own[0]} to"
                f" {committed.offset} by a late commit of an earlier run while this one held its"
                " messages: nothing is committed, and they come again"
            )
        elif committed.offset not in own:
            error = (
                f"the offset of {name_of(place)} in the group {group!r} was reset from {own[0]} to"
                f" {committed.offset} while a run held its messages: the reset counts, and nothing"
                " is committed"
            )
        else:
            return ""
        free = replace(claim, generation="", end=0, until=0.0, marked=claim.high)
        claims.end(place, claim.generation, free)
        return error

    # -- copies --------------------------------------------------------------------------------

    def _send(
        self,
        work: Work,
        entries: Sorted,
        made: Mapping[Place, Mapping[int, Decision]],
        held: Mapping[Place, Claim],
        files: GenerationFiles,
    ) -> dict[tuple[Place, int], str]:
        """Sends messages to the retry topic and to the topic for dead letters.

        Which are sent is written down first, for whoever settles after a kill, and only then is
        looked what others have written: of two that settle together, one at least sees the other.
        """
        retried = {self._producer.retry_of(topic) for topic in self._producer.topics}
        wanted: dict[Place, dict[int, Why]] = {}
        for place, decisions in made.items():
            claim = held[place]
            for offset, each in decisions.items():
                moves = work.moves(each)
                if not moves and each.action is not Action.DEAD_LETTER:
                    continue
                verdict = entries[place][offset].verdict
                again = offset < claim.marked or offset in claim.failed or place[0] in retried
                wanted.setdefault(place, {})[offset] = Why(
                    each.message_id,
                    verdict.reason,
                    verdict.stage,
                    each.attempt,
                    again,
                    each.not_before if moves else None,
                )
        if not wanted:
            return {}
        own = files.log.append(
            "letters", [[*place, offset] for place, whys in wanted.items() for offset in whys]
        )
        sent = {
            tuple(each)
            for name in files.log.names()
            if name.startswith("letters-") and name != own
            for each in files.log.read(name)
        }
        marked = {
            place: {
                offset: why._replace(again=why.again or (*place, offset) in sent)
                for offset, why in whys.items()
            }
            for place, whys in wanted.items()
        }
        return outbox.send(
            self._cluster,
            self._producer,
            marked,
            pipeline=self._env.pipeline,
            generation=work.generation,
            replaced=self._replaced({place: held[place] for place in wanted}),
        )

    def _replaced(self, held: Mapping[Place, Claim]) -> set[Place]:
        """Returns where the log is not the one that was read, as far as it can be told."""
        known = {topic: claim.topic_id for (topic, _), claim in held.items() if claim.topic_id}
        ids = self._cluster.admin.topic_ids(known) if known else {}
        other = {topic for topic, found in ids.items() if found != known[topic]}
        return {
            place
            for place, claim in held.items()
            if place[0] in other or self._cluster.ends(place)[1] < claim.end
        }

    # -- immediately ---------------------------------------------------------------------------

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        given = {entry.message_id: entry for entry in entries}
        if not given:
            return SettleReport()
        claims = self._claims(lease)
        files = claims.generation(lease.generation)
        if files.ended():
            return SettleReport(lapsed=len(given), undone=frozenset(given))
        before, now = files.now(), self._now()
        work = Work(self._producer, lease, _NOTHING, before, now)
        found = sort(entry for entry in given.values() if _is_ours(entry))
        done: dict[str, Action] = {}
        made: dict[Place, dict[int, Decision]] = {}
        held: dict[Place, Claim] = {}
        for place, each in found.items():
            claim = claims.read(place)
            if claim is None or claim.generation != lease.generation:
                continue
            earlier = before.get(place, {})
            done |= {d.message_id: d.action for o, d in earlier.items() if o in each}
            decisions = {
                offset: decision_of(entry, now)
                for offset, entry in each.items()
                if claim.start <= offset < claim.end and offset not in earlier
            }
            held[place] = claim
            made[place] = in_order(decisions, earlier, self._producer.order)
        refused = self._send(work, found, made, held, files)
        carried_out = {
            place: {
                offset: decision
                for offset, decision in work.carried_out(decisions, ()).items()
                if (place, offset) not in refused
            }
            for place, decisions in made.items()
        }
        files.note_now(carried_out)
        for decisions in carried_out.values():
            done |= {each.message_id: each.action for each in decisions.values()}
        undone = frozenset(given.keys() - done.keys())
        report = report_of(done.values(), failed=len(refused), errors=refused.values())
        return report + SettleReport(
            lapsed=len(undone) - len(refused), undone=undone, halted=report.left
        )

    # -- what it works with --------------------------------------------------------------------

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _now(self) -> float:
        return self._clock.now().timestamp()

    def _claims(self, lease: Lease) -> Claims:
        check_lease(lease, self._producer.kind, self._producer.place)
        cluster = str(lease.state.get("cluster", ""))
        files = group_files(self._env.staging, cluster, self._producer.group_id)
        return Claims(files, self._clock, str(lease.state.get("backfill") or "claims"))

    @property
    def _cluster(self) -> Cluster:
        if self._opened is None:
            self._opened = Cluster(self._producer, self._env)
        return self._opened


_NOTHING: Final = Settlement(rest=RELEASE)


def _until(lease: Lease, files: GenerationFiles) -> float:
    """Returns the end of a lease, by whichever note is the latest."""
    return max(lease.deadline.timestamp(), files.deadline() or 0.0)


def _is_ours(entry: Entry) -> bool:
    try:
        sort([entry])
    except ValueError:
        return False
    return True


def _coming_again(work: Work, done: Mapping[Place, list[Any]], lost: list[Place]) -> ComingAgain:
    """Returns which messages of a settled generation come again."""
    at_once = [each for place in work.places for each in work.at_once(place).values()]
    final = {each.message_id for each in at_once if each.action not in COMES_AGAIN}
    again = {each.message_id for each in at_once} - final
    explicit = all(about[1] is not None for about in done.values())
    names = work.names() if lost and explicit else {}
    if explicit and names is not None:
        again.update(*(about[1] for about in done.values()))
        again.update(each.message_id for place in lost for each in names.get(place, {}).values())
        return ComingAgain(frozenset(again - final))
    final.update(*(about[2] for about in done.values()))
    return ComingAgain(frozenset(final), all_but=True)
