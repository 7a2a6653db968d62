"""The half that renews and settles, from any process: knows the lease, changes the tables."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka import dead_letters
from airflow_broadway.producers.kafka.client import Cluster, Committed, Place
from airflow_broadway.producers.kafka.dead_letters import Why
from airflow_broadway.producers.kafka.opening import mark_of
from airflow_broadway.producers.kafka.options import place_of
from airflow_broadway.producers.kafka.ranges import contains
from airflow_broadway.producers.kafka.register import GenerationFiles, Register, group_files
from airflow_broadway.producers.kafka.settling import (
    AT_ONCE,
    Decision,
    decided,
    settle,
    settle_now,
    settled_at_once,
)
from airflow_broadway.producers.kafka.table import Table
from airflow_broadway.producers.kafka.work import Work, coming_again, decision_of, read_of
from airflow_broadway.producers.kit.checks import check_lease
from airflow_broadway.producers.kit.reports import beyond, report_of

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka.options import KafkaOptions

__all__ = ["KafkaCustodian"]

log = logging.getLogger(__name__)

_UNREAD: Final = "the interval was not read to its end: clear the run to go on"


class KafkaCustodian:
    """Renews and settles the generations of one group."""

    def __init__(self, producer: KafkaOptions, env: ProducerEnv) -> None:
        self._producer, self._env, self._clock = producer, env, env.clock
        self._registers: dict[tuple[str, str], Register] = {}
        self._opened: Cluster | None = None

    # -- holding -------------------------------------------------------------------------------

    def renew(self, lease: Lease) -> Lease | None:
        register = self._register(lease)
        files = register.generation(lease.generation)
        now = self._now()
        if files.ended() or now >= _until(lease, files):
            return None
        deadline = now + lease.seconds
        files.hold(deadline, lease.owner)
        # Only now, lest somebody took it before this was written.
        for place in read_of(lease):
            table = register.read(place)
            if table is None or lease.generation not in table.claims:
                return None
        return replace(lease, deadline=datetime.fromtimestamp(deadline, timezone.utc))

    def holds(self, lease: Lease) -> bool:
        files = self._register(lease).generation(lease.generation)
        return not files.ended() and self._now() < _until(lease, files)

    # -- settling ------------------------------------------------------------------------------

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        register = self._register(lease)
        files = register.generation(lease.generation)
        if lease.state.get("stopped") and not lease.state.get("read"):
            if files.deadline() is not None:  # it was about to hold something
                files.forget_soon()
            # It never held anything.
            return SettleReport(lapsed=settlement.expected or 0, again=ComingAgain(all_but=True))
        settled = files.log.settled()
        if settled is not None:
            files.forget_soon()  # whoever settled it may have died before it said so
            return settled.report
        files.end()
        work = Work(self._producer, lease, settlement, self._now())
        report = self._settled(work, register, files)
        report = files.log.end(report).report
        files.forget_soon()
        return report

    def _settled(self, work: Work, register: Register, files: GenerationFiles) -> SettleReport:
        generation, order = work.generation, self._producer.order
        refused: dict[tuple[Place, int], str] = {}
        letters: dict[Place, dict[int, Why]] = {}
        work.read_entries()
        for place in work.places:
            table = register.read(place)
            if table is None or generation not in table.claims:
                continue
            if work.needs_names(place, table):
                work.read_names()
            made = decided(table, generation, work.decisions(place), work.rest(place), order=order)
            dead = [offset for offset, each in made.items() if each.action is Action.DEAD_LETTER]
            if dead:
                letters[place] = {offset: self._why(work, place, offset, table) for offset in dead}
        if letters:
            refused = self._send(register, letters, generation, files)
        if refused and order != "none":  # these stay, and with them what is behind them
            work.read_names()
        counts: Counter[str] = Counter()
        at_once: Counter[str] = Counter()
        lapsed = 0
        changed: list[Place] = []
        for place in work.places:
            failed = [offset for (where, offset) in refused if where == place]
            found = self._settle_place(register, work, place, failed)
            if found is None:
                table = register.known(place)
                before = settled_at_once(table, generation) if table is not None else {}
                at_once.update(before)
                lapsed += max(0, work.messages(place) - sum(before.values()))
                continue
            changed.append(place)
            for name, number in found.items():
                if name.startswith(AT_ONCE):
                    at_once[name.removeprefix(AT_ONCE)] += number
                else:
                    counts[name] += number
        counts["left"] -= len(refused)
        errors = [*dict.fromkeys(refused.values())]
        halted = counts["left"]
        if work.backfill:  # nobody comes for them by himself
            halted += counts["requeued"] + work.unread
            errors += [_UNREAD] * work.unread
        else:
            errors += self._mirror(register, changed)
        made_report = SettleReport.from_json(
            {
                **counts,
                "lapsed": lapsed,
                "failed": len(refused),
                "halted": halted,
                "errors": errors,
            }
        )
        made_report += beyond(SettleReport.from_json(dict(at_once)), work.settlement)
        return replace(made_report, again=coming_again(work, register))

    def _settle_place(
        self, register: Register, work: Work, place: Place, failed: list[int]
    ) -> Mapping[str, int] | None:
        """End the claim on one partition; what it came to, ``None`` if others have it."""
        decisions = work.decisions(place)
        # Of what no letter could be sent, that stays where it is.
        decisions |= {offset: Decision(Action.LEAVE) for offset in failed}

        def settled(table: Table | None) -> tuple[Any, Mapping[str, int] | None]:
            if table is None:
                raise ProducerError(
                    f"the table of {place[0]}-{place[1]} is gone from staging: nothing of it can be"
                    " settled"
                )
            generation = work.generation
            if generation in table.claims:
                return settle(
                    table,
                    generation,
                    decisions,
                    work.rest(place),
                    order=self._producer.order,
                )
            past = table.past.get(generation)
            if past is not None or place in work.read:
                return table, past
            return table, {}  # it never held anything there

        return register.change(place, settled)

    def _why(self, work: Work, place: Place, offset: int, table: Table) -> Why:
        entry = work.entries[place][offset]
        again = offset in table.held or contains(table.marks, offset)
        return Why(entry.verdict.reason, entry.verdict.stage, entry.attempt, again)

    def _send(
        self,
        register: Register,
        letters: dict[Place, dict[int, Why]],
        generation: str,
        files: GenerationFiles,
    ) -> dict[tuple[Place, int], str]:
        """Send dead letters; those that may have been sent before say so.

        Which are sent is written down first, for whoever settles after a kill, and only then is
        looked what others have written: of two that settle at once, one at least sees the other.
        """
        log_of = files.log
        own = log_of.append(
            "letters", [[*place, offset] for place, whys in letters.items() for offset in whys]
        )
        sent = {
            tuple(each)
            for name in log_of.names()
            if name.startswith("letters-") and name != own
            for each in log_of.read(name)
        }
        marked = {
            place: {
                offset: why._replace(again=why.again or (*place, offset) in sent)
                for offset, why in whys.items()
            }
            for place, whys in letters.items()
        }
        return dead_letters.send(
            self._cluster,
            self._producer,
            marked,
            pipeline=self._env.pipeline,
            generation=generation,
            tables={place: table for place in letters if (table := register.known(place))},
        )

    def _mirror(self, register: Register, places: Iterable[Place]) -> list[str]:
        """Commit to Kafka what the tables say; why it could not be done, if so."""
        offsets: dict[Place, Committed] = {}
        owner = register.owner()
        for place in places:
            table = register.known(place)
            if table is not None:
                offsets[place] = mark_of(table, owner, register.version(place))
        if not offsets:
            return []
        try:
            # A commit that nobody answers takes much longer to say so.
            self._cluster.metadata()
            self._cluster.commit(offsets)
        except ProducerError as error:
            text = f"settled, but the group's offsets in Kafka are behind: {error}"
            log.warning("%s", text)
            return [text]
        return []

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        given = {entry.message_id: entry for entry in entries}
        if not given:
            return SettleReport()
        register = self._register(lease)
        files = register.generation(lease.generation)
        if files.ended():
            return SettleReport(lapsed=len(given), undone=frozenset(given))
        by_place: dict[Place, dict[int, Entry]] = {}
        for message_id, entry in given.items():
            try:
                topic, partition, offset = place_of(message_id)
            except ValueError:  # none of ours
                continue
            by_place.setdefault((topic, partition), {})[offset] = entry
        refused: dict[tuple[Place, int], str] = {}
        letters = self._letters_now(register, lease, by_place)
        if letters:
            refused = self._send(register, letters, lease.generation, files)
        done: dict[str, Action] = {}
        changed: list[Place] = []
        for place, found in by_place.items():
            if register.known(place) is None:
                continue
            decisions = {
                offset: decision_of(entry, self._now())
                for offset, entry in found.items()
                if (place, offset) not in refused
            }

            def settled(
                table: Table | None, decisions: Mapping[int, Decision] = decisions
            ) -> tuple[Any, dict[int, Action]]:
                assert table is not None
                return settle_now(table, lease.generation, decisions, order=self._producer.order)

            carried_out = register.change(place, settled)
            changed.append(place)
            done |= {found[offset].message_id: action for offset, action in carried_out.items()}
        if not register.durable and not lease.state.get("backfill"):
            # What is settled at once must outlive this process.
            for error in self._mirror(register, changed):
                log.warning("%s", error)
        undone = frozenset(given.keys() - done.keys())
        report = report_of(done.values(), failed=len(refused), errors=refused.values())
        return report + SettleReport(
            lapsed=len(undone) - len(refused), undone=undone, halted=report.left
        )

    def _letters_now(
        self, register: Register, lease: Lease, by_place: Mapping[Place, Mapping[int, Entry]]
    ) -> dict[Place, dict[int, Why]]:
        letters: dict[Place, dict[int, Why]] = {}
        for place, found in by_place.items():
            dead = {
                offset: entry
                for offset, entry in found.items()
                if entry.verdict.action is Action.DEAD_LETTER
            }
            table = register.read(place) if dead else None
            claim = None if table is None else table.claims.get(lease.generation)
            if table is None or claim is None:
                continue
            whys = {
                offset: Why(
                    entry.verdict.reason,
                    entry.verdict.stage,
                    entry.attempt,
                    offset in table.held or contains(table.marks, offset),
                )
                for offset, entry in dead.items()
                if contains(claim.ranges, offset)
            }
            if whys:
                letters[place] = whys
        return letters

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # -- what it works with --------------------------------------------------------------------

    def _now(self) -> float:
        return self._clock.now().timestamp()

    def _register(self, lease: Lease) -> Register:
        check_lease(lease, self._producer.kind, self._producer.place)
        cluster = str(lease.state.get("cluster", ""))
        folder = str(lease.state.get("backfill") or "tables")
        register = self._registers.get((cluster, folder))
        if register is None:
            files = group_files(self._env.staging, cluster, self._producer.group_id)
            register = self._registers[cluster, folder] = Register(files, self._clock, folder)
        return register

    @property
    def _cluster(self) -> Cluster:
        if self._opened is None:
            self._opened = Cluster(self._producer, self._env)
        return self._opened


def _until(lease: Lease, files: GenerationFiles) -> float:
    """Until when a generation holds, by whichever note is the latest."""
    return max(lease.deadline.timestamp(), files.deadline() or 0.0)
