"""Custody by parking in a lease queue: RabbitMQ.  A bundle holds one message here.

A message may be in several places at once, as copies.  What a process has in hand goes back when
its connection is gone: that ends a process here, as a kill does; to go on with another connection
is what the next one does anyway::

    receive   LeaseQueues.open · QueueJournal.note_opened
              a delivery, or ReturnsReader: what does the journal say? · Bundler.publish
              once it is confirmed: acknowledge the delivery
    settle    QueueJournal.settled · the lease queue's depth, and then
      by staging, while the lease is held and all is known:
              for each failure: QueueJournal.note_turn, first: write, look · Outbox.carry_out
              QueueJournal.note_settled: all · LeaseQueues.delete
      by bundles:
              LeaseQueues.fence, without a manifest · get
              for each failure as above · for each release: Outbox.release
              for what is not there: from staging · QueueJournal.note_settled: these
              acknowledge · if that was all: note_settled: all · LeaseQueues.delete
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tests.model.checker import Step
from tests.model.protocol import Run
from tests.model.state import State, Thread, put, set_gen, set_message, set_thread

__all__ = ["Bundles"]


class Copy(NamedTuple):
    """Where a message is, once.

    :param place: ``queue``; ``taken`` from it; ``lease`` queue; ``got`` from that by a settler;
        ``returns`` queue; ``back``, taken from there; ``dead``.
    :param gen: Whose lease queue it is in, or came from.
    :param marked: Whether it is marked as a repetition; a returned one: whether it was released.
    :param hand: Who has it in hand: the number of a generation, or a thread's name.
    """

    place: str
    gen: int = -1
    marked: bool = False
    hand: str = ""


class Journal(NamedTuple):
    """What is noted of a generation, and its lease queue.

    :param queue: Whether the lease queue is there.
    :param bound: Whether bundles can be published to it.
    :param opened: Whether it is noted.
    :param turns: How many settlements have published failures.
    :param settled: The messages whose bundles are settled; ``None``: no settlement has ended.
    :param whole: Whether it is true of all bundles.
    :param alone: The messages that were settled without their bundles.
    """

    queue: bool = False
    bound: bool = False
    opened: bool = False
    turns: int = 0
    settled: tuple[int, ...] | None = None
    whole: bool = False
    alone: tuple[int, ...] = ()
    report: tuple[str, ...] = ()


class Work(NamedTuple):
    """What a settlement has in hand.

    :param bundles: Whether it reads them.
    :param todo: The messages and what is to be published, one after another.
    :param read: The messages whose bundles it got.
    :param alone: Those that it settles without their bundles.
    :param looked: Whether it asked for what is not there.
    :param turn: ``""``, ``"noted"``, or whether what it publishes may be a repetition.
    """

    bundles: bool
    todo: tuple[tuple[int, str], ...] = ()
    read: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    looked: bool = False
    turn: str = ""


class Bundles:
    """Copies of messages, and the journals of those who held them."""

    code: Mapping[str, str] = {
        "receive": "producers.rabbitmq.receive.source.RabbitSource.receive",
        "declare": "producers.rabbitmq.broker.lease_queues.LeaseQueues.open",
        "note opened": "producers.rabbitmq.journal.QueueJournal.note_opened",
        "bundle": "producers.rabbitmq.receive.bundler.Bundler.publish",
        "confirmed": "producers.rabbitmq.amqp.confirms.ConfirmChannel",
        "settle": "producers.rabbitmq.journal.QueueJournal.settled",
        "depth": "producers.rabbitmq.broker.queue_calls.depth",
        "fence": "producers.rabbitmq.broker.lease_queues.LeaseQueues.fence",
        "get": "producers.rabbitmq.amqp.get.Getter.get",
        "turn": "producers.rabbitmq.journal.QueueJournal.note_turn",
        "turns": "producers.rabbitmq.journal.QueueJournal.note_turn",
        "carry out": "producers.rabbitmq.settle.outbox.Outbox.carry_out",
        "note": "producers.rabbitmq.journal.QueueJournal.note_settled",
        "done": "producers.rabbitmq.amqp.get.Getter.ack",
        "note all": "producers.rabbitmq.journal.QueueJournal.note_settled",
        "delete": "producers.rabbitmq.broker.lease_queues.LeaseQueues.delete",
    }

    def __init__(self, protocol: Run) -> None:
        self.protocol = protocol
        self._steps: dict[str, Callable[[State, Thread], Iterator[tuple[str, State]]]] = {
            "receive": self._receive,
            "declare": self._declare,
            "note opened": self._note_opened,
            "bundle": self._bundle,
            "confirmed": self._confirmed,
            "settle": self._settle,
            "depth": self._depth,
            "fence": self._fence,
            "get": self._get,
            "turn": self._note_turn,
            "turns": self._look_at_turns,
            "carry out": self._carry_out,
            "note": self._note,
            "done": self._done,
            "note all": self._note_all,
            "delete": self._delete,
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
        if thread.at in ("bundle", "confirmed"):  # a zombie's connection may go meanwhile
            return thread.chain and not state.gens[thread.gen].late
        return thread.at in ("declare", "note opened", "settle", "fence", "turn", "turns")

    def events(self, state: State) -> Iterator[Step[State]]:
        alive = {each.name for each in state.threads if each.chain}
        gens = {str(each.gen) for each in state.threads if each.chain}
        for number, copies in enumerate(state.broker):
            for copy in copies or ():
                if copy.place in ("queue", "dead", "returns"):
                    continue
                if copy.place in ("taken", "back") and copy.hand not in gens:
                    was = copy._replace(place="returns", hand="")
                    was = Copy("queue", -1, True) if copy.place == "taken" else was
                    note = f"the connection of generation {copy.hand} is gone: message {number}"
                elif copy.place == "got" and copy.hand not in alive:
                    was = copy._replace(place="lease", hand="")
                    note = f"the connection of {copy.hand} is gone: bundle {number}"
                elif copy.place == "lease" and state.gens[copy.gen].late:
                    was = Copy("returns", copy.gen)
                    note = f"bundle {number} of generation {copy.gen} lapses"
                else:
                    continue
                made = set_message(state, number, _moved(copies, copy, was))
                yield Step(f"RabbitMQ: {note}", made)

    def holds(self, state: State, gen: int) -> bool:
        return any(
            copy.gen == gen and copy.place in ("lease", "got")
            for copies in state.broker
            for copy in copies or ()
        )

    def lapse(self, state: State) -> State:
        gens = [gen._replace(late=True) for gen in state.gens]
        state = state._replace(gens=tuple(gens))
        while (event := next(self.events(state), None)) is not None:
            state = event.state
        return state

    def ended(self, state: State, gen: int) -> bool:
        return self._journal(state, gen).settled is not None

    @staticmethod
    def _journal(state: State, gen: int) -> Journal:
        return state.gens[gen].custody or Journal()

    def _change(self, state: State, gen: int, **changes: Any) -> State:
        return set_gen(state, gen, custody=self._journal(state, gen)._replace(**changes))

    # -- receiving -----------------------------------------------------------------------------

    def step(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        return self._steps[thread.at](state, thread)

    def _receive(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        own, run = thread.gen, self.protocol
        journal = self._journal(state, own)
        if journal.opened and state.gens[own].late:
            yield "its lease is about to end: it gives back", run.give_back(state, thread)
            return
        nothing = True
        for number, copies in enumerate(state.broker):
            found = [each for each in copies or () if each.place == "returns"]
            found = found or [each for each in copies or () if each.place == "queue"]
            if not found:
                continue
            copy, nothing = found[0], False
            if copy.place == "returns" and self._is_done(state, number, copy):
                if run.drop != "examine":
                    made = set_message(state, number, _moved(copies, copy))
                    yield f"returned bundle {number} is done with: dropped", made
                    return
                state = state._replace(broken="what is settled comes to no callback again")
            if not journal.opened:
                yield "messages are there", set_thread(state, thread, at="declare")
                return
            taken = copy._replace(place="taken" if copy.place == "queue" else "back", hand=str(own))
            made = set_message(state, number, _moved(copies, copy, taken))
            at = "confirmed" if run.drop == "confirm" else "bundle"
            made = set_thread(made, thread, at=at, memo=(number, taken))
            yield f"message {number} out of the {copy.place}", made
            break
        if nothing or any(state.gens[own].got):
            yield run.enough(state, thread)

    def _is_done(self, state: State, number: int, copy: Copy) -> bool:
        """Whether the journal says that a returned bundle needs no handling."""
        journal = self._journal(state, copy.gen)
        if journal.settled is None:
            return False
        of_bundle = journal.whole or number in journal.settled
        return (of_bundle and not copy.marked) or number in journal.alone

    def _declare(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        state = self._change(state, thread.gen, queue=True, bound=True)
        yield "a lease queue", set_thread(state, thread, at="note opened")

    def _note_opened(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        state = self._change(state, thread.gen, opened=True)
        yield "it is noted", set_thread(state, thread, at="receive")

    def _bundle(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, copy = thread.memo
        own, journal = thread.gen, self._journal(state, thread.gen)
        if self.protocol.drop != "confirm" and copy not in state.broker[number]:
            return
        if not (journal.queue and journal.bound):
            made = self.protocol.give_back(state, thread)
            yield "the bundle comes back: no lease queue takes it", made
        else:
            copies = _moved(state.broker[number], None, Copy("lease", own))
            made = set_message(state, number, copies)
            if self.protocol.drop == "confirm":
                yield f"bundle {number}", set_thread(made, thread, at="receive", memo=())
                return
            yield f"bundle {number}", set_thread(made, thread, at="confirmed")

    def _confirmed(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, copy = thread.memo
        gen, copies = state.gens[thread.gen], state.broker[number]
        if copy not in copies:
            return
        state = set_message(state, number, _moved(copies, copy))
        marked = copy.place == "back" or copy.marked
        marks = gen.marked if gen.got[number] else put(gen.marked, number, marked)
        state = set_gen(state, thread.gen, got=put(gen.got, number, True), marked=marks)
        at = "bundle" if self.protocol.drop == "confirm" else "receive"
        memo = thread.memo if self.protocol.drop == "confirm" else ()
        yield f"delivery {number} is acknowledged", set_thread(state, thread, at=at, memo=memo)

    # -- settling ------------------------------------------------------------------------------

    def _settle(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, _ = thread.settling[0]
        journal = self._journal(state, number)
        if journal.settled is None:
            yield "no settlement has ended", set_thread(state, thread, at="depth", memo=())
            return
        at = "delete" if journal.whole and journal.queue else "journal"
        yield "it is settled", set_thread(state, thread, at=at, report=journal.report, memo=())

    def _depth(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, _ = thread.settling[0]
        gen, journal, decision = state.gens[number], self._journal(state, number), thread.decision
        assert decision is not None
        if not (journal.queue and journal.opened):
            if journal.settled is not None:
                made = set_thread(state, thread, at="journal", report=journal.report)
                yield "another has deleted the lease queue", made
                return
            # Not declared, or deleted by nobody who noted it: nothing is published.
            report = tuple("lapsed" if each else "" for each in gen.got)
            work = Work(True)
            made = set_thread(state, thread, at="note", report=report, memo=work)
            yield "there is no lease queue", made
            return
        depth = sum(
            copy.place == "lease" and copy.gen == number
            for copies in state.broker
            for copy in copies or ()
        )
        counted = sum(gen.got)
        if not gen.late and decision.complete and depth == counted:
            todo = [(m, v) for m, v in enumerate(decision.verdicts) if v in ("retry", "dead")]
            note, work = f"all {counted} bundles are there", Work(False, tuple(todo))
            yield note, self._publishes(state, thread, work, report=decision.verdicts)
            return
        at = "get" if decision.published else "fence"
        yield f"{depth} bundles: they are read", set_thread(state, thread, at=at, memo=Work(True))

    def _fence(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        state = self._change(state, thread.settling[0][0], bound=False)
        yield "nobody can publish to it any more", set_thread(state, thread, at="get")

    def _get(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, _ = thread.settling[0]
        decision, report = thread.decision, [""] * self.protocol.messages
        assert decision is not None
        todo, read = [], []
        for message, copies in enumerate(state.broker):
            for copy in copies or ():
                if copy.place == "lease" and copy.gen == number:
                    got = copy._replace(place="got", hand=thread.name)
                    state = set_message(state, message, _moved(copies, copy, got))
                    verdict = report[message] = decision.verdicts[message] or "release"
                    read.append(message)
                    if verdict != "ack":
                        todo.append((message, verdict))
                    break
        work = Work(True, tuple(todo), tuple(read))
        yield f"bundles {read}", self._publishes(state, thread, work, report=tuple(report))

    def _publishes(self, state: State, thread: Thread, work: Work, **changes: Any) -> State:
        """Go on with the next message to publish, or with what comes after the last."""
        if work.todo:
            failure = work.todo[0][1] in ("retry", "dead")
            at = "turn" if failure and not work.turn else "carry out"
        else:
            at = "note" if work.bundles else "note all"
        if self.protocol.drop == "publish failures" and not work.bundles and work.todo:
            at = "delete"
        return set_thread(state, thread, at=at, memo=work, **changes)

    def _is_cut(self, state: State, thread: Thread) -> bool:
        """Whether the connection of a settler is gone, and with it what he had in hand."""
        number, _ = thread.settling[0]
        work = thread.memo
        return work.bundles and any(
            not any(
                copy.place == "got" and copy.hand == thread.name and copy.gen == number
                for copy in state.broker[message]
            )
            for message in work.read
        )

    def _note_turn(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, work = thread.settling[0][0], thread.memo
        turns = self._journal(state, number).turns
        if self.protocol.drop == "turn":  # look first, then write
            made = set_thread(state, thread, at="turns", memo=work._replace(turn=f"after {turns}"))
            yield f"{turns} turns before", made
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
        made = self._publishes(state, thread, work._replace(turn="again" if repeats else "first"))
        yield "others settle it, too" if repeats else "it is the first", made

    def _carry_out(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        run, (number, _), work = self.protocol, thread.settling[0], thread.memo
        if self._is_cut(state, thread):
            return
        message, verdict = work.todo[0]
        broken = run.carried(state, thread, message, verdict)
        again = work.turn == "again" or message in work.alone or state.gens[number].marked[message]
        copy = {
            "retry": Copy("queue", -1, True),
            "dead": Copy("dead", -1, again),
            "release": Copy("returns", number, True),
        }[verdict]
        state = set_message(state, message, _moved(state.broker[message], None, copy))
        made = self._publishes(state, thread, work._replace(todo=work.todo[1:]))
        yield f"message {message}: {verdict}", made._replace(broken=broken)

    def _note(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        """By bundles: what is not there, then the note of what is done."""
        number, work, decision = thread.settling[0][0], thread.memo, thread.decision
        assert decision is not None
        gen, journal = state.gens[number], self._journal(state, number)
        report, other = thread.report, journal.settled
        if decision.published and not gen.late and other is None and not work.looked and work.read:
            alone = tuple(
                message
                for message, verdict in enumerate(decision.verdicts)
                if verdict not in ("", "release") and message not in work.read
            )
            todo = tuple((m, decision.verdicts[m]) for m in alone if decision.verdicts[m] != "ack")
            for message in alone:
                report = put(report, message, decision.verdicts[message])
            work = work._replace(todo=todo, alone=alone, looked=True)
            made = self._publishes(state, thread, work, report=report)
            yield f"from staging: {list(alone)}", made
            return
        done = tuple(sorted({*work.read, *(other or ())}))
        state = self._change(
            state,
            number,
            settled=done,
            whole=journal.whole,
            alone=journal.alone if other is not None else work.alone,
            report=report,
        )
        broken = ""
        for message in (*work.read, *work.alone):
            broken = broken or self.protocol.carried(
                state, thread, message, decision.verdicts[message] or "release"
            )
        state = set_thread(state, thread, at="done" if work.read else "journal", report=report)
        yield f"bundles {list(done)} are settled", state._replace(broken=broken)

    def _done(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, work, decision = thread.settling[0][0], thread.memo, thread.decision
        assert decision is not None
        if self._is_cut(state, thread):
            return
        for message in work.read:
            copies = state.broker[message]
            mine = next(c for c in copies if c.place == "got" and c.hand == thread.name)
            state = set_message(state, message, _moved(copies, mine))
        gen, journal = state.gens[number], self._journal(state, number)
        done = journal.settled or ()
        whole = decision.published and not gen.late and len(done) == sum(gen.got)
        at = "note all" if whole else "journal"
        yield f"bundles {list(work.read)}", set_thread(state, thread, at=at)

    def _note_all(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, work = thread.settling[0][0], thread.memo
        if not work.bundles and state.gens[number].late:
            made = set_thread(state, thread, at="get", memo=Work(True))
            yield "the lease has come to its end: bundles are read", made
            return
        done = self._journal(state, number).settled or ()
        state = self._change(state, number, settled=done, whole=True, report=thread.report)
        yield "all bundles are settled", set_thread(state, thread, at="delete")

    def _delete(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number = thread.settling[0][0]
        broken, decision = "", thread.decision
        for message, copies in enumerate(state.broker):
            for copy in copies or ():
                if copy.place in ("lease", "got") and copy.gen == number:
                    state = set_message(state, message, _moved(state.broker[message], copy))
                    if decision is not None and decision.verdicts[message] == "ack":
                        broken = broken or self.protocol.carried(state, thread, message, "ack")
        state = self._change(state, number, queue=False, bound=False)
        if self.protocol.drop == "publish failures" and thread.memo and thread.memo.todo:
            state = set_thread(state, thread, at="turn")
        else:
            state = set_thread(state, thread, at="journal", memo=())
        yield "the lease queue", state._replace(broken=broken)

    # -- promises ------------------------------------------------------------------------------

    def wrong(self, state: State) -> str:
        for number, copies in enumerate(state.broker):
            if copies is None:
                continue
            if not copies and all(gen.outcome[number] != "ok" for gen in state.gens):
                return "no message is lost"
            letters = [copy.marked for copy in copies if copy.place == "dead"]
            if letters.count(False) > 1:
                return "a repetition is marked"
        return ""

    def left(self, state: State) -> str:
        for number, copies in enumerate(state.broker):
            if any(copy.place != "dead" for copy in copies or ()):
                return f"message {number} is left over"
        return ""


def _moved(
    copies: tuple[Copy, ...], copy: Copy | None, made: Copy | None = None
) -> tuple[Copy, ...]:
    """The copies of a message with one taken away, and one put there."""
    left = list(copies)
    if copy is not None:
        left.remove(copy)
    if made is not None:
        left.append(made)
    return tuple(sorted(left))
