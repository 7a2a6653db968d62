"""The embedded queue compared with a model of plain lists, in random steps."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from airflow_broadway.core.custody.dead_letters import Choice
from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.testing.clock import ManualClock
from tests.unit.producers.verdicts import VERDICTS

LEASE = 60.0
GENERATIONS = ["a", "b", "c"]
COUNTS = {
    Action.ACK: "acked",
    Action.RETRY: "requeued",
    Action.DEAD_LETTER: "dead_lettered",
    Action.LEAVE: "left",
    Action.RELEASE: "released",
}


@dataclass
class Row:
    key: str
    number: int
    sent: float
    ready: float
    attempt: int = 1
    deliveries: int = 0
    holder: str | None = None
    last_holder: str | None = None


@dataclass
class LeaseModel:
    deadline: float
    early: dict[str, Action] = field(default_factory=dict)
    report: SettleReport | None = None


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = ManualClock()
        self.queue = SqliteQueue(Path(self.folder.name) / "q.db", "q", clock=self.clock)
        self.rows: dict[str, Row] = {}
        self.dead: dict[str, Row] = {}
        self.leases: dict[str, LeaseModel] = {}
        self.epoch = 0
        self.number = 0

    def teardown(self) -> None:
        self.queue.close()
        self.folder.cleanup()

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def generation(self, name: str) -> str:
        """Returns the current generation of that name."""
        return f"{name}{self.epoch}"

    # ------------------------------------------------------------------------------------ steps

    @rule(count=st.integers(1, 8), delay=st.sampled_from([0.0, 0.0, 10.0]))
    def send(self, count: int, delay: float) -> None:
        bodies = [(b"%d" % (self.number + place), None, delay) for place in range(count)]
        for key in self.queue.send(bodies):
            assert key not in self.rows
            assert key not in self.dead
            self.rows[key] = Row(key, self.number, self.now, self.now + delay)
            self.number += 1

    @rule(seconds=st.sampled_from([1.0, 10.0, 29.0, 61.0]))
    def advance_clock(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def new_generations(self) -> None:
        self.epoch += 1

    @rule(name=st.sampled_from(GENERATIONS), demand=st.integers(1, 9))
    def receive(self, name: str, demand: int) -> None:
        generation = self.generation(name)
        lease = self.leases.get(generation)
        if lease is not None and lease.report is not None:
            with pytest.raises(LeaseLapsed):
                self.queue.receive(generation, demand, seconds=LEASE)
            return
        messages = self.queue.receive(generation, demand, seconds=LEASE)
        self.lapse(except_for=generation)
        ready = [
            row
            for row in self.rows.values()
            if row.holder is None and row.ready <= self.now and row.last_holder != generation
        ]
        ready.sort(key=lambda row: (row.ready, row.sent, row.number))
        expected = ready[:demand]
        assert [(m.message_id, m.data, m.attempt, m.redelivered) for m in messages] == [
            (row.key, b"%d" % row.number, row.attempt, row.deliveries > 0) for row in expected
        ]
        for row in expected:
            row.holder = generation
            row.deliveries += 1
        if expected:
            lease = self.leases.setdefault(generation, LeaseModel(0.0))
            lease.deadline = max(lease.deadline, self.now + LEASE)

    @rule(name=st.sampled_from(GENERATIONS))
    def renew(self, name: str) -> None:
        generation = self.generation(name)
        lease = self.leases.get(generation)
        renewed = self.queue.renew(generation, LEASE)
        if lease is None or lease.report is not None:
            assert renewed is None
        else:
            assert renewed is not None
            lease.deadline = self.now + LEASE

    @rule(name=st.sampled_from(GENERATIONS), data=st.data())
    def settle_now(self, name: str, data: Any) -> None:
        generation = self.generation(name)
        chosen = data.draw(self.verdicts(generation))
        entries = [Entry(key, "", verdict) for key, verdict in chosen.items()]
        report = self.queue.settle_now(generation, entries)
        lease = self.leases.get(generation)
        counts = dict.fromkeys([*COUNTS.values(), "lapsed"], 0)
        for key, verdict in chosen.items():
            row = self.rows.get(key)
            if lease is not None and row is not None and row.holder == generation:
                lease.early.setdefault(key, verdict.action)
                self.apply(row, verdict, lease)
            if lease is not None and key in lease.early:
                counts[COUNTS[lease.early[key]]] += 1
            else:
                counts["lapsed"] += 1
        undone = chosen.keys() - (set() if lease is None else lease.early.keys())
        assert report == SettleReport(**counts, undone=frozenset(undone))  # type: ignore[arg-type]

    @rule(name=st.sampled_from(GENERATIONS), rest=st.sampled_from(VERDICTS), data=st.data())
    def settle(self, name: str, rest: Verdict, data: Any) -> None:
        generation = self.generation(name)
        chosen = data.draw(self.verdicts(generation))
        entries = [Entry(key, "", verdict) for key, verdict in chosen.items()]
        report = self.queue.settle(generation, Settlement(rest=rest, entries=lambda: iter(entries)))
        lease = self.leases.setdefault(generation, LeaseModel(self.now))
        if lease.report is not None:
            assert report == lease.report
            return
        counts = dict.fromkeys([*COUNTS.values(), "lapsed"], 0)
        leased = [row for row in self.rows.values() if row.holder == generation]
        for row in leased:
            verdict = chosen.get(row.key, rest)
            self.apply(row, verdict, lease)
            counts[COUNTS[verdict.action]] += 1
        known = {row.key for row in leased} | set(lease.early)
        counts["lapsed"] = len(set(chosen) - known)
        lease.report = SettleReport(**counts)  # type: ignore[arg-type]
        if self.number:  # an unknown queue keeps no record
            assert report == lease.report
        else:
            del self.leases[generation]

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def requeue(self, data: Any) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.dead)), unique=True))
        assert self.queue.requeue(Choice(ids=frozenset(keys))).count == len(keys)
        for key in keys:
            row = self.dead.pop(key)
            row.attempt, row.ready, row.last_holder = 1, self.now, None
            self.rows[key] = row

    # -------------------------------------------------------------------------------- the model

    def verdicts(self, generation: str) -> st.SearchStrategy[dict[str, Verdict]]:
        """Draws verdicts, mostly on messages that the generation leases."""
        leased = sorted(row.key for row in self.rows.values() if row.holder == generation)
        keys = 3 * leased + sorted(self.rows)
        if not keys:
            return st.just({})
        return st.dictionaries(st.sampled_from(keys), st.sampled_from(VERDICTS), max_size=5)

    def lapse(self, except_for: str) -> None:
        """Ends the lapsed leases, as each receive does first."""
        for generation, lease in self.leases.items():
            if lease.report is None and lease.deadline <= self.now and generation != except_for:
                leased = [row for row in self.rows.values() if row.holder == generation]
                for row in leased:
                    row.holder = None
                lease.report = SettleReport(lapsed=len(leased))

    def apply(self, row: Row, verdict: Verdict, lease: LeaseModel) -> None:
        generation, row.holder = row.holder, None
        row.last_holder = generation
        if verdict.action is Action.ACK:
            del self.rows[row.key]
        elif verdict.action is Action.DEAD_LETTER:
            self.dead[row.key] = self.rows.pop(row.key)
        elif verdict.action is Action.RETRY:
            row.attempt += 1
            row.ready = self.now + verdict.delay
        elif verdict.action is Action.LEAVE:
            row.ready = max(self.now, lease.deadline)

    @invariant()
    def depth_agrees(self) -> None:
        def lapsed(row: Row) -> bool:
            return row.holder is not None and self.leases[row.holder].deadline <= self.now

        ready = [
            row
            for row in self.rows.values()
            if lapsed(row) or (row.holder is None and row.ready <= self.now)
        ]
        leased = sum(row.holder is not None and not lapsed(row) for row in self.rows.values())
        depth = self.queue.depth()
        assert depth.ready == len(ready)
        assert depth.leased == leased
        assert depth.delayed == len(self.rows) - len(ready) - leased
        assert depth.dead == len(self.dead)
        oldest = self.now - min(row.sent for row in ready) if ready else None
        assert depth.oldest_age == (oldest if oldest is None else pytest.approx(oldest))

    @invariant()
    def open_leases_agree(self) -> None:
        expected = {
            name: sum(row.holder == name for row in self.rows.values())
            for name, lease in self.leases.items()
            if lease.report is None
        }
        assert {r.lease.generation: r.held for r in self.queue.leases()} == expected


TestQueueAgainstModel = QueueMachine.TestCase
TestQueueAgainstModel.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
