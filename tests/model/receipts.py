"""Custody by receipts with a visibility timeout: SQS.

A receipt settles one message, and each is a request of its own.  What a producer knows lies in
files of its own, beside the run's::

    receive   ReceiveMessage · secure: is it settled? · Receipts.hold
    settle    Receipts.load: is it settled? · Receipts.begin
              for each message: DeleteMessage; or SendMessage, then DeleteMessage; or
              ChangeMessageVisibility
              Receipts.end: create the report

SQS takes a receipt whose time is over as long as nobody else has received the message; afterwards
it says that it has deleted it, and has not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tests.model.checker import Step
from tests.model.protocol import Run
from tests.model.state import State, Thread, put, set_gen, set_message, set_thread

#: Where a message is: not sent yet, visible, in flight, deleted.
LATER, READY, FLYING, GONE = "later", "ready", "flying", "gone"


class Message(NamedTuple):
    """A message at SQS.

    :param receipt: The generation that received it last.
    :param delivered: Whether anybody ever did.
    :param letter: Whether a dead letter of it was sent.
    """

    place: str
    receipt: int = -1
    delivered: bool = False
    letter: bool = False


class Log(NamedTuple):
    """A generation's files.

    :param held: By message, whether its receipt is written down.
    :param begun: Whether a settlement has begun.
    :param report: How it ended.
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
            if message.place == FLYING and state.gens[message.receipt].late:
                after = set_message(state, number, message._replace(place=READY))
                yield Step(f"SQS: message {number} is visible again", after)

    def holds(self, state: State, gen: int) -> bool:
        return any(message.place == FLYING and message.receipt == gen for message in state.broker)

    def lapse(self, state: State) -> State:
        broker = [
            message._replace(place=READY) if message.place == FLYING else message
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
                taken = Message(FLYING, thread.gen, True, state.broker[number].letter)
                after = set_message(after, number, taken)
            memo = tuple((number, state.broker[number].delivered) for number in ready)
            yield f"messages {ready}", set_thread(after, thread, at="secure", memo=memo)
        if not ready or any(state.gens[thread.gen].got):
            yield self.protocol.enough(state, thread)

    def _secure(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        if self._log(state, thread.gen).report:
            yield "it is settled: it gives back", self.protocol.give_back(state, thread)
        else:
            yield "it is not settled", set_thread(state, thread, at="write")

    def _write(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        gen, log = state.gens[thread.gen], self._log(state, thread.gen)
        got, marked, held = gen.got, gen.marked, log.held
        for number, redelivered in thread.memo:
            # Handed out before, it is settled by its newest receipt.
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
            why = "its lease is over" if any(log.held) else "it holds nothing"
            yield why, set_thread(state, thread, at="end log", report=lapsed)
            return
        memo = log.begun, log.held
        after = set_thread(state, thread, at="begin log", report=("",) * len(lapsed), memo=memo)
        yield "the receipts", after

    def _begin(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, _ = thread.settling[0]
        log = self._log(state, number)
        if not log.report:  # else its files are gone, and the mark goes with the next sweep
            state = set_gen(state, number, custody=log._replace(begun=True))
        yield "settling begins", self._go_on(state, thread, -1)

    def _go_on(self, state: State, thread: Thread, place: int, **changes: object) -> State:
        """Goes to the next message whose receipt is known."""
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
        mine = message.receipt == number
        if state.gens[number].late:
            done = put(thread.report, place, "lapsed")
            yield f"message {place}: not asked for", self._go_on(state, thread, place, report=done)
            return
        broken = run.carried(state, thread, place, verdict)
        came, last = verdict, verdict != "dead" or thread.result == "second"
        sends = verdict == "dead" and last == (run.drop == "letter")
        if sends:
            note = "SendMessage"
            state = set_message(state, place, message._replace(letter=True))
        elif verdict in ("ack", "dead"):
            note = "DeleteMessage"
            if mine:
                state = set_message(state, place, message._replace(place=GONE))
        else:
            note = "ChangeMessageVisibility"
            if mine and message.place == FLYING:
                state = set_message(state, place, message._replace(place=READY))
            elif not thread.memo[0]:  # an earlier settlement may have done so
                came = "lapsed"
        if last:
            done = put(thread.report, place, came)
            state = self._go_on(state, thread, place, report=done)
        else:
            state = set_thread(state, thread, result="second")
        yield f"message {place}: {note}: {came}", state._replace(broken=broken)

    def _end(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, _ = thread.settling[0]
        log = self._log(state, number)
        report = log.report or thread.report
        state = set_gen(state, number, custody=Log((False,) * len(report), False, report))
        note = "the report" if not log.report else "the report that was first stands"
        yield note, set_thread(state, thread, at="journal", report=report, memo=(), place=0)

    # -- promises ------------------------------------------------------------------------------

    def wrong(self, state: State) -> str:
        for number, message in enumerate(state.broker):
            done = message.letter or any(gen.outcome[number] == "ok" for gen in state.gens)
            if message.place == GONE and not done:
                return "no message is lost"
        return ""

    def left(self, state: State) -> str:
        for number, message in enumerate(state.broker):
            if message.place not in (GONE, LATER):
                return f"message {number} is left over"
        for number in range(len(state.gens)):
            log = self._log(state, number)
            if any(log.held) and not log.report:  # else they go with the report, in time
                return "a lease is left over"
        return ""
