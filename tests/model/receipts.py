"""Custody by receipts with a visibility timeout: SQS.

A receipt settles one message, and each is a request of its own.  A producer keeps its state in its
own files, next to the run's::

    receive   ReceiveMessage · secure: is it settled? · Receipts.hold
    settle    Receipts.load: is it settled? · Receipts.begin
              for each message: DeleteMessage; or SendMessage, then DeleteMessage; or
              ChangeMessageVisibility
              Receipts.end: create the report

SQS accepts an expired receipt as long as the message was not received again; afterwards it confirms
a deletion that did not happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tests.model.checker import Step
from tests.model.protocol import Run
from tests.model.state import State, Thread, put, set_gen, set_message, set_thread

#: The place of a message: not sent yet, visible, in flight, deleted.
LATER, READY, IN_FLIGHT, DELETED = "later", "ready", "in flight", "deleted"


class Message(NamedTuple):
    """A message at SQS.

    :param receipt: The generation that received it last.
    :param delivered: Whether it was ever received.
    :param dead_lettered: Whether a dead letter of it was sent.
    """

    place: str
    receipt: int = -1
    delivered: bool = False
    dead_lettered: bool = False


class Log(NamedTuple):
    """A generation's files.

    :param held: By message, whether its receipt is recorded.
    :param begun: Whether a settlement has begun.
    :param report: The result of its settlement.
    """

    held: tuple[bool, ...]
    begun: bool = False
    report: tuple[str, ...] = ()


class Receipts:
    """Messages, and the logs of their receivers."""

    code: Mapping[str, str] = {
        "receive": "producers.engine.source.EngineSource.receive",
        "secure": "producers.engine.source.EngineSource.secure",
        "write": "producers.engine.receipts.Receipts.hold",
        "settle": "producers.engine.receipts.Receipts.load",
        "begin log": "producers.engine.receipts.Receipts.begin",
        "carry out": "producers.engine.settlement.EngineSettlement.carry_out",
        "end log": "producers.engine.receipts.Receipts.end",
    }

    def __init__(self, protocol: Run) -> None:
        self.protocol = protocol
        self._steps = {
            "receive": self._receive,
            "secure": self._secure,
            "write": self._write,
            "settle": self._load,
            "begin log": self._begin,
            "carry out": self._carry_out,
            "end log": self._end,
        }

    def start(self, present: int, messages: int) -> tuple[Message, ...]:
        return (*[Message(READY)] * present, *[Message(LATER)] * (messages - present))

    def send(self, state: State) -> State | None:
        for number, message in enumerate(state.broker):
            if message.place == LATER:
                return set_message(state, number, Message(READY))
        return None

    def is_private(self, state: State, thread: Thread) -> bool:
        return thread.at in ("secure", "write", "settle", "begin log", "end log")

    def events(self, state: State) -> Iterator[Step[State]]:
        for number, message in enumerate(state.broker):
            if message.place == IN_FLIGHT and state.gens[message.receipt].late:
                after = set_message(state, number, message._replace(place=READY))
                yield Step(f"SQS: message {number} is visible again", after)

    def holds(self, state: State, gen: int) -> bool:
        return any(m.place == IN_FLIGHT and m.receipt == gen for m in state.broker)

    def lapse(self, state: State) -> State:
        broker = [
            message._replace(place=READY) if message.place == IN_FLIGHT else message
            for message in state.broker
        ]
        gens = [gen._replace(late=True) for gen in state.gens]
        return state._replace(broker=tuple(broker), gens=tuple(gens))

    def ended(self, state: State, gen: int) -> bool:
        return bool(self._log(state, gen).report)

    def _log(self, state: State, gen: int) -> Log:
        return state.gens[gen].custody or Log((False,) * self.protocol.messages)

    # -- receiving -----------------------------------------------------------------------------

    def step(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        return self._steps[thread.at](state, thread)

    def _receive(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        ready = [number for number, item in enumerate(state.broker) if item.place == READY]
        if ready:
            after = state
            for number in ready:
                taken = Message(IN_FLIGHT, thread.gen, True, state.broker[number].dead_lettered)
                after = set_message(after, number, taken)
            memo = tuple((number, state.broker[number].delivered) for number in ready)
            yield f"messages {ready}", set_thread(after, thread, at="secure", memo=memo)
        if not ready or any(state.gens[thread.gen].got):
            yield self.protocol.stop_source(state, thread)

    def _secure(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        if self._log(state, thread.gen).report:
            yield "it is settled: it releases", self.protocol.release(state, thread)
        else:
            yield "it is not settled", set_thread(state, thread, at="write")

    def _write(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        gen, log = state.gens[thread.gen], self._log(state, thread.gen)
        got, marked, held = gen.got, gen.marked, log.held
        for number, redelivered in thread.memo:
            # A message that was received before is settled by its newest receipt.
            marked = marked if got[number] else put(marked, number, redelivered)
            got, held = put(got, number, True), put(held, number, True)
        changes = {"got": got, "marked": marked, "custody": log._replace(held=held)}
        state = set_gen(state, thread.gen, **changes)
        yield "the receipts", set_thread(state, thread, at="receive", memo=())

    # -- settling ------------------------------------------------------------------------------

    def _load(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, _ = thread.settling[0]
        gen, log = state.gens[number], self._log(state, number)
        if log.report:
            after = set_thread(state, thread, at="journal", report=log.report)
            yield "it is settled: only the report", after
            return
        lapsed = tuple("lapsed" if received else "" for received in gen.got)
        if not any(log.held) or gen.late:
            reason = "its lease is over" if any(log.held) else "it holds nothing"
            yield reason, set_thread(state, thread, at="end log", report=lapsed)
            return
        memo = log.begun, log.held
        after = set_thread(state, thread, at="begin log", report=("",) * len(lapsed), memo=memo)
        yield "the receipts", after

    def _begin(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, _ = thread.settling[0]
        log = self._log(state, number)
        if not log.report:  # else its files are deleted, and the next sweep deletes the mark
            state = set_gen(state, number, custody=log._replace(begun=True))
        yield "settling begins", self._continue(state, thread, -1)

    def _continue(self, state: State, thread: Thread, place: int, **changes: object) -> State:
        """Continues with the next message whose receipt is known."""
        receipts = thread.memo[1]
        place += 1
        while place < len(receipts) and not receipts[place]:
            place += 1
        at = "carry out" if place < len(receipts) else "end log"
        return set_thread(state, thread, at=at, place=place % len(receipts), result="", **changes)

    def _carry_out(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        run, (number, _), place = self.protocol, thread.settling[0], thread.place
        message, decision = state.broker[place], thread.decision
        assert decision is not None
        verdict = decision.verdicts[place] or "release"
        is_newest = message.receipt == number
        if state.gens[number].late:
            done = put(thread.report, place, "lapsed")
            yield f"message {place}: no request", self._continue(state, thread, place, report=done)
            return
        broken = run.check_verdict(state, thread, place, verdict)
        result, last = verdict, verdict != "dead" or thread.result == "second"
        sends = verdict == "dead" and last == (run.drop == "letter")
        if sends:
            note = "SendMessage"
            state = set_message(state, place, message._replace(dead_lettered=True))
        elif verdict in ("ack", "dead"):
            note = "DeleteMessage"
            if is_newest:
                state = set_message(state, place, message._replace(place=DELETED))
        else:
            note = "ChangeMessageVisibility"
            if is_newest and message.place == IN_FLIGHT:
                state = set_message(state, place, message._replace(place=READY))
            elif not thread.memo[0]:  # an earlier settlement may have done so
                result = "lapsed"
        if last:
            done = put(thread.report, place, result)
            state = self._continue(state, thread, place, report=done)
        else:
            state = set_thread(state, thread, result="second")
        yield f"message {place}: {note}: {result}", state._replace(broken=broken)

    def _end(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, _ = thread.settling[0]
        log = self._log(state, number)
        report = log.report or thread.report
        state = set_gen(state, number, custody=Log((False,) * len(report), False, report))
        note = "the report" if not log.report else "the first report stands"
        yield note, set_thread(state, thread, at="journal", report=report, memo=(), place=0)

    # -- promises ------------------------------------------------------------------------------

    def violation(self, state: State) -> str:
        for number, message in enumerate(state.broker):
            done = message.dead_lettered or any(gen.outcome[number] == "ok" for gen in state.gens)
            if message.place == DELETED and not done:
                return "no message is lost"
        return ""

    def leftovers(self, state: State) -> str:
        for number, message in enumerate(state.broker):
            if message.place not in (DELETED, LATER):
                return f"message {number} is left over"
        for number in range(len(state.gens)):
            log = self._log(state, number)
            if any(log.held) and not log.report:  # else they are deleted with the report, in time
                return "a lease is left over"
        return ""
