"""Custody by rows with a lease: the embedded queue.

Each call is one transaction.  A deadline that has passed ends a lease only when the next receiver
detects it::

    receive   end_lapsed, then a lease and its messages: one transaction
    settle    all verdicts, and the lease's end: one transaction; a second time, only the report
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from tests.model.checker import Step
from tests.model.protocol import Run
from tests.model.state import State, Thread, put, set_gen, set_thread

#: The place of a message, unless a generation holds it: not sent yet, ready, acknowledged, dead.
LATER, READY, ACKED, DEAD = -1, -2, -3, -4
_ENDS: Final = {"ack": ACKED, "dead": DEAD, "retry": READY, "release": READY}


class Rows:
    """Messages, each by its place, and whether it was ever delivered."""

    code: Mapping[str, str] = {
        "receive": "producers.sqlite.queue.SqliteQueue.receive",
        "settle": "producers.sqlite.queue.SqliteQueue.settle",
    }

    def __init__(self, protocol: Run) -> None:
        self.protocol = protocol

    def start(self, present: int, messages: int) -> tuple[tuple[int, bool], ...]:
        places = [READY] * present + [LATER] * (messages - present)
        return tuple((place, False) for place in places)

    def send(self, state: State) -> State | None:
        for message, (place, _) in enumerate(state.broker):
            if place == LATER:
                return state._replace(broker=put(state.broker, message, (READY, False)))
        return None

    def is_private(self, state: State, thread: Thread) -> bool:
        return False

    def events(self, state: State) -> Iterator[Step[State]]:
        return iter(())

    def holds(self, state: State, gen: int) -> bool:
        return bool(state.gens[gen].custody == "open")

    def ended(self, state: State, gen: int) -> bool:
        return isinstance(state.gens[gen].custody, tuple)

    # -- steps ---------------------------------------------------------------------------------

    def step(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        return (self._receive if thread.at == "receive" else self._settle)(state, thread)

    def _receive(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        run, own = self.protocol, thread.gen
        if state.gens[own].custody not in ("", "open"):
            yield "its lease has ended: it releases", run.release(state, thread)
            return
        before = state
        for number, gen in enumerate(state.gens):
            if gen.custody == "open" and gen.late and number != own:
                free = tuple([(READY, d) if p == number else (p, d) for p, d in state.broker])
                state = set_gen(state._replace(broker=free), number, custody="lapsed")
        ready = [message for message, (place, _) in enumerate(state.broker) if place == READY]
        if not ready:
            yield run.stop_source(before, thread)
            return
        gen, broker, broken = state.gens[own], list(state.broker), ""
        got, marked = list(gen.got), list(gen.marked)
        if gen.report:
            broken = "nothing is received for what is settled"
        for message in ready:
            got[message], marked[message] = True, broker[message][1]
            broker[message] = own, run.drop != "deliveries"
        state = state._replace(broker=tuple(broker), broken=broken)
        state = set_gen(state, own, got=tuple(got), marked=tuple(marked), custody="open")
        yield f"leases {ready}", state
        if any(before.gens[own].got):
            yield run.stop_source(before, thread)

    def _settle(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        run, (number, _) = self.protocol, thread.settling[0]
        gen, decision = state.gens[number], thread.decision
        assert decision is not None
        if gen.custody not in ("", "open") and run.drop != "ended":
            lapsed = tuple("lapsed" if received else "" for received in gen.got)
            report = lapsed if gen.custody == "lapsed" else gen.custody
            after = set_thread(state, thread, at="journal", report=report)
            yield "its lease has ended: only the report", after
            return
        broker, broken = list(state.broker), ""
        report = [""] * run.messages
        for message, (place, delivered) in enumerate(state.broker):
            holds = place == number
            if run.drop == "ended" and gen.got[message]:
                broken = broken or ("" if holds else "who holds a message settles it")
                holds = True
            if holds:
                verdict = report[message] = decision.verdicts[message] or "release"
                broker[message] = _ENDS[verdict], delivered
                broken = broken or run.check_verdict(state, thread, message, verdict)
            elif gen.got[message]:
                report[message] = "lapsed"
        if gen.custody or run.drop != "never opened":
            state = set_gen(state, number, custody=tuple(report))
        state = set_thread(state, thread, at="journal", report=tuple(report))
        note = f"generation {number}: {' '.join(value or '-' for value in report)}"
        yield note, state._replace(broker=tuple(broker), broken=broken)

    # -- promises ------------------------------------------------------------------------------

    def lapse(self, state: State) -> State:
        gens = [gen._replace(late=gen.late or gen.custody == "open") for gen in state.gens]
        return state._replace(gens=tuple(gens))

    def violation(self, state: State) -> str:
        return ""

    def leftovers(self, state: State) -> str:
        for message, (place, _) in enumerate(state.broker):
            if place not in (ACKED, DEAD, LATER):
                return f"message {message} is left over"
        if any(gen.custody == "open" for gen in state.gens):
            return "a lease is left over"
        return ""
