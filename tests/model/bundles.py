"""Custody in holding queues: RabbitMQ.  A bundle holds one message here.

A message may be in several places, as copies.  Unacknowledged deliveries are requeued when their
connection is closed: that ends a process here, as a kill does; a process that reconnected would
only do what the next process does::

    sweep     HoldingQueues.claim · HoldingQueue.fence · QueueJournal.note_swept: create
              for each open message: Outbox.carry_out · HoldingQueue.free
    receive   HoldingQueues.claim · QueueJournal.note_opened · is_over? · bind · the opening bundle
              a delivery · Bundler.publish · once it is confirmed: acknowledge the delivery
    settle    without a manifest: QueueJournal.note_closed
              opened?
              HoldingQueues.claim · QueueJournal.settled · HoldingQueue.fence
      by staging, while all is known:
              for each failure: QueueJournal.note_turn, first: write, look · Outbox.carry_out
              QueueJournal.note_settled: create · HoldingQueue.purge
      by bundles:
              get · for each that is not to be acked: as above · note_settled · HoldingQueue.free
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tests.model.checker import Step
from tests.model.protocol import Run
from tests.model.state import State, Thread, put, set_gen, set_message, set_thread


class Copy(NamedTuple):
    """One place of a message.

    :param place: ``queue``; ``taken`` from it; ``held`` in a holding queue; ``dead``.
    :param gen: The generation in whose holding queue it is.
    :param marked: Whether it is marked as a repetition.
    :param hand: The number of the generation that holds its delivery.
    """

    place: str
    gen: int = -1
    marked: bool = False
    hand: str = ""


class Journal(NamedTuple):
    """The record of a generation, and its holding queue.

    :param opened: Whether its holding queue is noted.
    :param closed: Whether it may not begin.
    :param bound: Whether bundles can be published to the queue.
    :param opening: Whether the bundle that opens the queue is in it.
    :param claim: The thread whose connection has the claim; empty if none has.
    :param turns: The number of settlements that have published failures.
    :param settled: ``""``, ``swept``, or ``settled``.
    :param bundles: The messages whose bundles that covers; ``None``: all.
    """

    opened: bool = False
    closed: bool = False
    bound: bool = False
    opening: bool = False
    claim: str = ""
    turns: int = 0
    settled: str = ""
    bundles: tuple[int, ...] | None = ()
    report: tuple[str, ...] = ()


class Work(NamedTuple):
    """The state of a settlement or sweep.

    :param gen: The generation whose holding queue it has claimed.
    :param reads: Whether it reads the bundles.
    :param todo: The messages and the verdicts to publish, one after another.
    :param read: The messages whose bundles it has read.
    :param turn: ``""``, ``"noted"``, or whether what it publishes may be a repetition.
    :param sweeps: Whether it is a sweep.
    """

    gen: int
    reads: bool
    todo: tuple[tuple[int, str], ...] = ()
    read: tuple[int, ...] = ()
    turn: str = ""
    sweeps: bool = False


class Bundles:
    """Copies of messages, and the journals of the generations that held them."""

    code: Mapping[str, str] = {
        "receive": "producers.rabbitmq.receive.source.RabbitSource.receive",
        "sweep fence": "producers.rabbitmq.broker.holding_queues.HoldingQueue.fence",
        "note swept": "producers.rabbitmq.journal.QueueJournal.note_swept",
        "note opened": "producers.rabbitmq.journal.QueueJournal.note_opened",
        "is over": "producers.rabbitmq.journal.QueueJournal.is_over",
        "bind": "producers.rabbitmq.broker.holding_queues.HoldingQueues.open",
        "bundle": "producers.rabbitmq.receive.intake.Intake.publish",
        "confirmed": "producers.rabbitmq.amqp.channels.ConfirmChannel",
        "settle": "producers.rabbitmq.journal.QueueJournal.opened",
        "note closed": "producers.rabbitmq.journal.QueueJournal.note_closed",
        "opened": "producers.rabbitmq.journal.QueueJournal.opened",
        "claim": "producers.rabbitmq.broker.holding_queues.HoldingQueues.claim",
        "settled": "producers.kit.generation_log.GenerationLog.settled",
        "fence": "producers.rabbitmq.broker.holding_queues.HoldingQueue.fence",
        "get": "producers.rabbitmq.broker.holding_queues.HoldingQueue.bundles",
        "turn": "producers.rabbitmq.journal.QueueJournal.note_turn",
        "turns": "producers.rabbitmq.journal.QueueJournal.note_turn",
        "carry out": "producers.rabbitmq.settle.settlement.Outbox.carry_out",
        "note": "producers.rabbitmq.journal.QueueJournal.note_settled",
        "free": "producers.rabbitmq.broker.holding_queues.HoldingQueue.free",
    }

    def __init__(self, protocol: Run) -> None:
        self.protocol = protocol
        self._steps: dict[str, Callable[[State, Thread], Iterator[tuple[str, State]]]] = {
            "receive": self._receive,
            "sweep fence": self._sweep_fence,
            "note swept": self._note_swept,
            "note opened": self._note_opened,
            "is over": self._is_over,
            "bind": self._bind,
            "bundle": self._bundle,
            "confirmed": self._confirmed,
            "settle": self._settle,
            "note closed": self._note_closed,
            "opened": self._look_at_opened,
            "claim": self._claim,
            "settled": self._look_at_settled,
            "fence": self._fence,
            "get": self._get,
            "turn": self._note_turn,
            "turns": self._look_at_turns,
            "carry out": self._carry_out,
            "note": self._note,
            "free": self._free,
        }

    # -- the broker ----------------------------------------------------------------------------

    def start(self, present: int, messages: int) -> tuple[Any, ...]:
        later: list[Any] = [None] * (messages - present)
        return (*[(Copy("queue"),)] * present, *later)

    def send(self, state: State) -> State | None:
        for number, copies in enumerate(state.broker):
            if copies is None:
                return set_message(state, number, (Copy("queue"),))
        return None

    def is_private(self, state: State, thread: Thread) -> bool:
        if thread.at in ("bundle", "confirmed"):  # a zombie's connection may be closed meanwhile
            return thread.chain and not state.gens[thread.gen].late
        return thread.at in ("settle", "note closed", "opened", "settled", "turn", "turns")

    def events(self, state: State) -> Iterator[Step[State]]:
        alive = {thread.name for thread in state.threads if thread.chain}
        gens = {str(thread.gen) for thread in state.threads if thread.chain}
        for number, copies in enumerate(state.broker):
            for copy in copies or ():
                if copy.place == "taken" and copy.hand not in gens:
                    after = _move(copies, copy, Copy("queue", -1, True))
                    note = f"the connection of generation {copy.hand} is closed: message {number}"
                    yield Step(f"RabbitMQ: {note}", set_message(state, number, after))
        for number in range(len(state.gens)):
            claim = self._journal(state, number).claim
            if claim and claim not in alive:
                note = f"the connection of {claim} is closed: the claim of generation {number}"
                yield Step(f"RabbitMQ: {note}", self._change(state, number, claim=""))

    def holds(self, state: State, gen: int) -> bool:
        return any(copy.gen == gen for copies in state.broker for copy in copies or ())

    def lapse(self, state: State) -> State:
        gens = [gen._replace(late=True) for gen in state.gens]
        state = state._replace(gens=tuple(gens))
        while (event := next(self.events(state), None)) is not None:
            state = event.state
        return state

    def ended(self, state: State, gen: int) -> bool:
        return self._journal(state, gen).settled != ""

    @staticmethod
    def _journal(state: State, gen: int) -> Journal:
        return state.gens[gen].custody or Journal()

    def _change(self, state: State, gen: int, **changes: Any) -> State:
        return set_gen(state, gen, custody=self._journal(state, gen)._replace(**changes))

    def _held(self, state: State, gen: int) -> list[int]:
        """Returns the messages in the holding queue of a generation, repetitions included."""
        return [
            number
            for number, copies in enumerate(state.broker)
            for copy in copies or ()
            if copy.place == "held" and copy.gen == gen
        ]

    def _is_cut(self, state: State, thread: Thread) -> bool:
        """Returns whether the connection that claimed a holding queue is closed."""
        return self._journal(state, thread.memo.gen).claim != thread.name

    # -- receiving -----------------------------------------------------------------------------

    def step(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        return self._steps[thread.at](state, thread)

    def _receive(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        own, run = thread.gen, self.protocol
        journal = self._journal(state, own)
        if journal.opened and state.gens[own].late:
            yield "its lease is about to end: it releases", run.release(state, thread)
            return
        if not journal.opened:
            for number, gen in enumerate(state.gens):
                rival = self._journal(state, number)
                if rival.opening and not rival.claim and (gen.late or rival.settled):
                    after = self._change(state, number, claim=thread.name)
                    work = Work(number, True, sweeps=True)
                    after = set_thread(after, thread, at="sweep fence", memo=work)
                    yield f"the holding queue of generation {number} is claimed", after
                    return
        is_empty = True
        for number, copies in enumerate(state.broker):
            queued = [copy for copy in copies or () if copy.place == "queue"]
            if not queued:
                continue
            is_empty = False
            if not journal.opened:
                after = self._change(state, own, claim=thread.name)
                yield "the queue has messages", set_thread(after, thread, at="note opened")
                return
            taken = queued[0]._replace(place="taken", hand=str(own))
            after = set_message(state, number, _move(copies, queued[0], taken))
            at = "confirmed" if run.drop == "confirm" else "bundle"
            after = set_thread(after, thread, at=at, memo=(number, taken))
            yield f"message {number} out of the queue", after
            break
        if is_empty or any(state.gens[own].got):
            yield run.stop_source(state, thread)

    def _note_opened(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        state = self._change(state, thread.gen, opened=True)
        at = "bind" if self.protocol.drop == "is over" else "is over"
        yield "it is noted", set_thread(state, thread, at=at)

    def _is_over(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        journal = self._journal(state, thread.gen)
        if journal.closed or journal.settled:
            after = self._change(state, thread.gen, claim="")
            after = self.protocol.release(after, thread)
            yield "it was released before its first message", after
            return
        yield "it may begin", set_thread(state, thread, at="bind")

    def _bind(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        if self._journal(state, thread.gen).claim != thread.name:
            return
        if state.gens[thread.gen].report:
            state = state._replace(broken="nothing is received for what is settled")
        state = self._change(state, thread.gen, bound=True, opening=True, claim="")
        yield "it is bound, and opened", set_thread(state, thread, at="receive", memo=())

    def _bundle(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, copy = thread.memo
        own, journal = thread.gen, self._journal(state, thread.gen)
        if self.protocol.drop != "confirm" and copy not in state.broker[number]:
            return
        if not journal.bound and self.protocol.drop != "fence":
            after = self.protocol.release(state, thread)
            yield "the bundle is returned: it is unbound", after
            return
        after = set_message(state, number, _move(state.broker[number], None, Copy("held", own)))
        if self.protocol.drop == "fence" and not journal.opening:
            after = state  # into a queue that is being purged
        if self.protocol.drop == "confirm":
            yield f"bundle {number}", set_thread(after, thread, at="receive", memo=())
            return
        yield f"bundle {number}", set_thread(after, thread, at="confirmed")

    def _confirmed(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, copy = thread.memo
        gen, copies = state.gens[thread.gen], state.broker[number]
        if copy not in copies:
            return
        state = set_message(state, number, _move(copies, copy))
        marks = gen.marked if gen.got[number] else put(gen.marked, number, copy.marked)
        state = set_gen(state, thread.gen, got=put(gen.got, number, True), marked=marks)
        at = "bundle" if self.protocol.drop == "confirm" else "receive"
        memo = thread.memo if self.protocol.drop == "confirm" else ()
        yield f"delivery {number} is acknowledged", set_thread(state, thread, at=at, memo=memo)

    # -- sweeping ------------------------------------------------------------------------------

    def _sweep_fence(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        if self._is_cut(state, thread):
            return
        state = self._change(state, thread.memo.gen, bound=False)
        yield "it is unbound", set_thread(state, thread, at="note swept")

    def _note_swept(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        work = thread.memo
        journal = self._journal(state, work.gen)
        if not journal.settled:
            state = self._change(state, work.gen, settled="swept", bundles=())
        note = f"it is {journal.settled or 'swept'}"
        yield note, set_thread(state, thread, at="get")

    # -- settling ------------------------------------------------------------------------------

    def _settle(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, decision = thread.settling[0][0], thread.decision
        assert decision is not None
        if not decision.published:
            yield "no manifest", set_thread(state, thread, at="note closed", report=self._none())
            return
        opened = self._journal(state, number).opened
        note = "it has a holding queue" if opened else "it has none"
        at = "claim" if opened else "journal"
        yield note, set_thread(state, thread, at=at, report=self._none())

    def _none(self) -> tuple[str, ...]:
        return ("",) * self.protocol.messages

    def _note_closed(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        state = self._change(state, thread.settling[0][0], closed=True)
        yield "it may not begin", set_thread(state, thread, at="opened")

    def _look_at_opened(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        opened = self._journal(state, thread.settling[0][0]).opened
        note = "it has begun meanwhile" if opened else "it has not begun"
        yield note, set_thread(state, thread, at="claim" if opened else "journal")

    def _claim(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number = thread.settling[0][0]
        if self._journal(state, number).claim:
            return
        state = self._change(state, number, claim=thread.name)
        yield "the claim", set_thread(state, thread, at="settled", memo=Work(number, True))

    def _look_at_settled(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, decision = thread.settling[0][0], thread.decision
        assert decision is not None
        gen, journal = state.gens[number], self._journal(state, number)
        lapsed = tuple("lapsed" if received else "" for received in gen.got)
        if journal.settled == "settled":
            at = "free" if journal.opening else "journal"
            read = self._held(state, number)
            if journal.bundles is not None:
                read = [bundle for bundle in read if bundle in journal.bundles]
            after = set_thread(
                state,
                thread,
                at=at,
                report=journal.report,
                memo=Work(number, True, read=tuple(read)) if at == "free" else (),
            )
            yield "it is settled", after if at == "free" else self._unclaimed(after, number, thread)
            return
        if journal.settled == "swept" or not journal.opening:
            after = self._unclaimed(state, number, thread)
            after = set_thread(after, thread, at="journal", report=lapsed, memo=())
            yield "another run has what it held", after
            return
        yield "it is not settled", set_thread(state, thread, at="fence")

    def _unclaimed(self, state: State, number: int, thread: Thread) -> State:
        if self._journal(state, number).claim != thread.name:
            return state
        return self._change(state, number, claim="")

    def _fence(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, decision = thread.settling[0][0], thread.decision
        assert decision is not None
        if self._is_cut(state, thread):
            return
        state = self._change(state, number, bound=False)
        counted = sum(state.gens[number].got)
        if decision.complete and len(self._held(state, number)) == counted:
            todo = [(m, v) for m, v in enumerate(decision.verdicts) if v in ("retry", "dead")]
            work = Work(number, False, tuple(todo))
            after = self._publish(state, thread, work, report=decision.verdicts)
            yield f"it is unbound, and all {counted} bundles are there", after
            return
        yield "it is unbound", set_thread(state, thread, at="get")

    def _get(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        work = thread.memo
        if self._is_cut(state, thread):
            return
        read, journal = self._held(state, work.gen), self._journal(state, work.gen)
        if work.sweeps:
            covered = journal.bundles if journal.settled == "settled" else ()
            todo = [(m, "release") for m in read if covered is not None and m not in covered]
            if self.protocol.drop == "covers" and len(todo) < len(read):
                todo = [(m, "release") for m in read]
                state = state._replace(broken="what is settled comes to no callback again")
            work = work._replace(todo=tuple(todo), read=tuple(read))
            after = self._publish(state, thread, work)
            yield f"bundles {read}", after
            return
        decision, report = thread.decision, [""] * self.protocol.messages
        assert decision is not None
        todo = []
        for message in read:
            verdict = report[message] = decision.verdicts[message] or "release"
            if verdict != "ack":
                todo.append((message, verdict))
        after = work._replace(todo=tuple(todo), read=tuple(read))
        yield f"bundles {read}", self._publish(state, thread, after, report=tuple(report))

    def _publish(self, state: State, thread: Thread, work: Work, **changes: Any) -> State:
        """Continues with the next message to publish, or with the step after the last."""
        if work.todo:
            failure = work.todo[0][1] in ("retry", "dead")
            at = "turn" if failure and not work.turn else "carry out"
        else:
            at = "free" if work.sweeps else "note"
        if self.protocol.drop == "publish failures" and not work.reads and work.todo:
            at = "free"
        return set_thread(state, thread, at=at, memo=work, **changes)

    def _note_turn(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, work = thread.settling[0][0], thread.memo
        turns = self._journal(state, number).turns
        if self.protocol.drop == "turn":  # look first, then write
            after = set_thread(state, thread, at="turns", memo=work._replace(turn=f"after {turns}"))
            yield f"{turns} turns before", after
            return
        state = self._change(state, number, turns=min(turns + 1, 2))
        yield "a turn", set_thread(state, thread, at="turns", memo=work._replace(turn="noted"))

    def _look_at_turns(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, work = thread.settling[0][0], thread.memo
        turns = self._journal(state, number).turns
        repeats = turns > 1
        if self.protocol.drop == "turn":
            before = int(work.turn.removeprefix("after "))
            repeats = before > 0
            state = self._change(state, number, turns=min(before + 1, 2))
        after = self._publish(state, thread, work._replace(turn="again" if repeats else "first"))
        yield "others settle it, too" if repeats else "it is the first", after

    def _carry_out(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        run, work = self.protocol, thread.memo
        if self._is_cut(state, thread) and run.drop != "turn":
            return
        message, verdict = work.todo[0]
        broken = "" if work.sweeps else run.check_verdict(state, thread, message, verdict)
        again = work.turn == "again" or state.gens[work.gen].marked[message]
        copy = Copy("dead", -1, again) if verdict == "dead" else Copy("queue", -1, True)
        state = set_message(state, message, _move(state.broker[message], None, copy))
        after = self._publish(state, thread, work._replace(todo=work.todo[1:]))
        yield f"message {message}: {verdict}", after._replace(broken=broken)

    def _note(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        """Creates the note once: the first one stands."""
        work, decision = thread.memo, thread.decision
        assert decision is not None
        gen, journal = state.gens[work.gen], self._journal(state, work.gen)
        if journal.settled and self.protocol.drop != "first note":
            report = journal.report
            if journal.settled == "swept":
                report = tuple("lapsed" if received else "" for received in gen.got)
            after = self._unclaimed(state, work.gen, thread)
            after = set_thread(after, thread, at="journal", report=report, memo=())
            yield f"it is {journal.settled} by another", after
            return
        bundles = work.read if work.reads else None
        state = self._change(
            state, work.gen, settled="settled", bundles=bundles, report=thread.report
        )
        broken, done = "", work.read
        if not work.reads:
            done = tuple(m for m, verdict in enumerate(decision.verdicts) if verdict)
        for message in done:
            verdict = decision.verdicts[message] or "release"
            broken = broken or self.protocol.check_verdict(state, thread, message, verdict)
        after = work if work.reads else work._replace(read=tuple(self._held(state, work.gen)))
        state = set_thread(state, thread, at="free", memo=after)
        yield "it is settled", state._replace(broken=broken)

    def _free(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        """Removes the settled bundles, then the bundle that opens the queue."""
        work = thread.memo
        if self._is_cut(state, thread):
            return
        read = work.read
        if self.protocol.drop == "publish failures" and not work.reads and work.todo:
            read = tuple(self._held(state, work.gen))
        for message in read:
            copies = state.broker[message]
            copy = next(c for c in copies if c.place == "held" and c.gen == work.gen)
            state = set_message(state, message, _move(copies, copy))
        state = self._change(state, work.gen, opening=False)
        if self.protocol.drop == "publish failures" and not work.reads and work.todo:
            yield "it is purged", set_thread(state, thread, at="turn")
            return
        state = self._change(state, work.gen, claim="")
        at = "receive" if work.sweeps else "journal"
        yield "the holding queue is free", set_thread(state, thread, at=at, memo=())

    # -- promises ------------------------------------------------------------------------------

    def violation(self, state: State) -> str:
        for number, copies in enumerate(state.broker):
            if copies is None:
                continue
            if not copies and all(gen.outcome[number] != "ok" for gen in state.gens):
                return "no message is lost"
            marks = [copy.marked for copy in copies if copy.place == "dead"]
            if marks.count(False) > 1:
                return "a repetition is marked"
        for number in range(len(state.gens)):
            journal = self._journal(state, number)
            if self._held(state, number) and not (journal.opening or journal.bound):
                return "held messages are in a holding queue that names its generation"
        return ""

    def leftovers(self, state: State) -> str:
        for number, copies in enumerate(state.broker):
            if any(copy.place != "dead" for copy in copies or ()):
                return f"message {number} is left over"
        for number in range(len(state.gens)):
            if self._journal(state, number).opening:
                return f"the holding queue of generation {number} is not free"
        return ""


def _move(
    copies: tuple[Copy, ...], copy: Copy | None, added: Copy | None = None
) -> tuple[Copy, ...]:
    """Returns the copies of a message with one removed, and one added."""
    left = list(copies)
    if copy is not None:
        left.remove(copy)
    if added is not None:
        left.append(added)
    return tuple(sorted(left))
