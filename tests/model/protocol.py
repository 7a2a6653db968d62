"""The custody protocol: each task of a run, one atomic step after another.

A step is one durable write, one request to a broker, or one read of what others write.  In the
order of the code::

    process   iter_unsettled · settling of each that is dead · sweep_retention
              open_generation: the copy in _open/ · the record
              the source: receive, secure (by the custody) · ProcessWriter.close
              publish: is there an intent? · create the manifest
              without batchers: settling of its own
    batch     plan_batches · begin_try · for each batch: begin: own it? · handle_batch
              check: own it still? · record: create the outcome · settle_unwatched
    ack       RunWatcher.settle: which are unsettled? · settling of each · keep_report
    settling  build_settlement: what is recorded now? · settle_generation: create the intent
              the custodian: settle (by the custody) · record_settled: create the report
              forget_open: remove the copy in _open/

A process may be killed or sleep between any two.  Both are the same in the model: Airflow treats a
thread as dead and continues without it, and from then on it may take its next step at any time, or
never.  Actions of Airflow and users: the next try; no further try; a task cleared; the sensor's
time-out; a run that is over though its tasks are running.  A deadline may pass at any time.

Not modelled: renewals (a deadline that has not passed yet may have been moved), immediate settling,
and errors of a broker or a disk, which end a task as a kill does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, Protocol

from tests.model.checker import Step
from tests.model.state import A, B, Decision, Gen, State, Thread, put, set_gen, set_thread

#: The step of each thread, and the function that takes it in the code.
CODE: Final = {
    "sweep": "staging.run_folder.iter_unsettled",
    "retain": "staging.retention.sweep_retention",
    "list": "staging.run_folder.StagedRun.open_generation",
    "open": "staging.run_folder.StagedRun.open_generation",
    "receive": "core.stages.receiving.Receiving",
    "stage": "staging.writer.ProcessWriter.close",
    "look": "staging.run_folder.StagedRun.publish",
    "publish": "staging.run_folder.StagedRun.publish",
    "plan": "staging.planner.plan_batches",
    "try": "core.formats.ownership.begin_try",
    "begin": "core.formats.record_batch.BatchRecorder.begin",
    "handle": "core.pipeline.Pipeline.handle_batch",
    "check": "core.formats.ownership.Ownership.check",
    "record": "core.formats.record_batch.BatchRecorder.record",
    "stand in": "runs.watch.RunWatcher.settle_unwatched",
    "ack": "runs.watch.RunWatcher.settle",
    "report": "runs.account.keep_report",
    "decide": "staging.settling.settlement.build_settlement",
    "intent": "staging.settling.settlement.settle_generation",
    "settle": "core.custody.protocol.Custodian.settle",
    "journal": "staging.settling.journal.record_settled",
    "forget": "staging.run_folder.StagedRun.forget_open",
}

#: The first step of each task.
FIRST: Final = {"process": "sweep", "batch": "plan", "ack": "ack"}
#: Steps that read generations of others.
_LOOKS: Final = ("sweep", "retain", "ack", "report")
#: The step that ends a task.
END: Final = "end"


class Custody(Protocol):
    """One way of holding messages: steps of the source, the custodian and the broker."""

    #: The step of a thread, and the function that takes it in the code.
    code: Mapping[str, str]

    def start(self, present: int, messages: int) -> tuple[Any, ...]:
        """Returns the broker with ``present`` of ``messages`` messages; others are sent later."""
        ...

    def send(self, state: State) -> State | None:
        """Sends the publisher's next message; ``None`` if none is left."""
        ...

    def step(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        """Yields the next step of a source or custodian: ``receive``, ``settle``, or its own."""
        ...

    def is_private(self, state: State, thread: Thread) -> bool:
        """Returns whether the next step only reads its generation's records, or the clock."""
        ...

    def events(self, state: State) -> Iterator[Step[State]]:
        """Yields the broker's spontaneous steps."""
        ...

    def holds(self, state: State, gen: int) -> bool:
        """Returns whether a generation's deadline may still pass."""
        ...

    def lapse(self, state: State) -> State:
        """Advances time until every lease has lapsed."""
        ...

    def ended(self, state: State, gen: int) -> bool:
        """Returns whether a settlement has ended the generation's lease."""
        ...

    def violation(self, state: State) -> str:
        """Returns the promise that is broken at the broker; empty if none."""
        ...

    def leftovers(self, state: State) -> str:
        """Returns the leftovers of a finished world."""
        ...


class Run:
    """The protocol, as a model to explore.

    :param batchers: Whether the pipeline has batchers.
    :param present: Messages that are in the queue at the beginning.
    :param later: Messages that are sent at any time.
    :param trouble: The number of faults: a kill, a clear, a time-out.
    :param lapses: The number of deadlines that pass.
    :param second_run: Whether the second run ever begins.
    :param kinds: Kinds of faults: a task is treated as dead, and tried again, or for good; the
        sensor looks for the last time; the process task is cleared; the run is over.
    :param overlap: Whether the second run may begin before the first is over.
    :param retention: Whether a balanced run may be old enough to be removed.
    :param results: The possible results of a callback for a message's first delivery.
    :param drop: The guards that are left out.
    """

    def __init__(
        self,
        custody: Callable[[Run], Custody],
        *,
        batchers: bool,
        present: int = 1,
        later: int = 0,
        trouble: int = 1,
        lapses: int = 1,
        second_run: bool = True,
        kinds: Collection[str] = ("again", "for good", "last look", "clear", "over"),
        overlap: bool = False,
        retention: bool = False,
        results: Sequence[str] = ("ok", "dead"),
        drop: str = "",
    ) -> None:
        self.batchers = batchers
        self.present, self.messages = present, present + later
        self.trouble, self.lapses = trouble, lapses
        self.second_run, self.overlap = second_run, overlap
        self.kinds = kinds
        self.retention = retention
        self.results = results
        self.drop = drop
        self.custody = custody(self)
        self.code = {**CODE, **self.custody.code}
        self._steps: dict[str, Callable[[State, Thread], Iterator[tuple[str, State]]]] = {
            "sweep": self._sweep,
            "retain": self._retain,
            "list": self._list,
            "open": self._open,
            "stage": self._stage,
            "look": self._look,
            "publish": self._publish,
            "plan": self._plan,
            "try": self._try,
            "begin": self._begin,
            "handle": self._handle,
            "check": self._check,
            "record": self._record,
            "stand in": self._stand_in,
            "ack": self._ack,
            "report": self._report,
            "decide": self._decide,
            "intent": self._intent,
            "journal": self._journal,
            "forget": self._forget,
        }

    # -- the model -----------------------------------------------------------------------------

    def start(self) -> State:
        none = (False,) * self.messages
        second = Gen(B, False, False, none, none, ("",) * self.messages)
        threads = (self.thread("A1", A), self.thread("B1", B, gen=0))
        broker = self.custody.start(self.present, self.messages)
        return State((second,), threads, broker, self.trouble, self.lapses)

    @staticmethod
    def thread(name: str, run: int, task: str = "process", gen: int = -1, **more: Any) -> Thread:
        """Returns a new execution of a task."""
        return Thread(name, run, task, FIRST[task], gen, **more)

    def steps(self, state: State) -> list[Step[State]]:
        steps: list[Step[State]] = []
        for thread in state.threads:
            steps += self.steps_of(state, thread)
        steps += [
            Step(name, after) for kind, name, after in self._airflow(state) if kind in self.kinds
        ]
        if state.lapses > 0:
            for number, gen in enumerate(state.gens):
                if (
                    gen.run == A
                    and gen.record
                    and not gen.late
                    and self.custody.holds(state, number)
                ):
                    late = set_gen(state, number, late=True)
                    name = f"clock: the deadline of generation {number} passes"
                    steps.append(Step(name, late._replace(lapses=state.lapses - 1)))
        steps += self.custody.events(state)
        sent = self.custody.send(state)
        if sent is not None:
            steps.append(Step("publisher: another message is sent", sent))
        return steps

    def steps_of(self, state: State, thread: Thread) -> list[Step[State]]:
        """Returns the possible next steps of one thread."""
        waits = not self.second_run or not (self.overlap or state.over[A])
        if waits and thread.run == B and thread.at == "sweep":
            return []
        own = self._steps.get(thread.at)
        private = own is None and self.custody.is_private(state, thread)
        alone = ""
        if (own is not None or private) and self._is_alone(state, thread, private):
            alone = thread.name
        return [
            Step(self.name(thread, note), self._continue_run(after, thread), alone)
            for note, after in (own or self.custody.step)(state, thread)
        ]

    @staticmethod
    def _is_alone(state: State, thread: Thread, private: bool) -> bool:
        """Returns whether the step's timing makes no difference to others.

        It makes none in the files of a generation that no other thread will read.
        """
        at = thread.at
        if at == "stage":
            return True
        if at in _LOOKS or (thread.run == A and state.trouble > 0):
            return False
        gen = thread.settling[0][0] if thread.settling else thread.gen
        owns = at in ("try", "begin", "check", "record")
        timed = state.lapses > 0 and not state.gens[gen].late and thread.run == A
        if timed and (owns or private):
            return False
        for rival in state.threads:
            if rival.name == thread.name:
                continue
            if any(number == gen for number, _ in rival.settling):
                return False
            if rival.run != thread.run:
                if rival.at == "sweep" and state.over[thread.run]:
                    return False
            elif (
                rival.chain
                or rival.at in _LOOKS
                or rival.gen in (gen, -1)
                or (owns and rival.task == "batch")
            ):
                return False
        return True

    def name(self, thread: Thread, note: str) -> str:
        """Describes a thread's step."""
        return f"{thread.name} {thread.task}: {self.code[thread.at]}: {note}"

    def violation(self, state: State) -> str:
        if state.broken:
            return state.broken
        calm = state.trouble == self.trouble and state.lapses == self.lapses
        for message in range(self.messages):
            took = [gen.marked[message] for gen in state.gens if gen.got[message]]
            if took.count(False) > 1:
                return "a repetition is marked"
            if calm and len(took) > 1 and "retry" not in self.results:
                return "the normal path makes no repetition"
        for gen in state.gens:
            if gen.record and not gen.report and not gen.listed:
                return "a sweep finds what is unsettled"
        return self.custody.violation(state)

    # -- Airflow, and users --------------------------------------------------------------------

    def _airflow(self, state: State) -> Iterator[tuple[str, str, State]]:
        """Yields possible faults: kind, name, and the state afterwards."""
        if state.trouble <= 0:
            return
        less = state._replace(trouble=state.trouble - 1)
        main = next((thread for thread in state.threads if thread.run == A and thread.chain), None)
        if main is None:
            if state.over[A]:
                again = less._replace(over=put(less.over, A, False))
                after = self._begin_task(again, "process", None)
                yield "clear", "Airflow: process is cleared", after
            return
        dead = set_thread(less, main, chain=False)
        prefix = f"Airflow: {main.name} {main.task} is treated as dead"
        task = "process" if main.task == "given back" else main.task
        yield "again", f"{prefix}, and tried again", self._begin_task(dead, task, main)
        if main.task != "ack":
            yield "for good", f"{prefix} for good", self._begin_task(dead, "ack", main)
            last = self._begin_task(less, "ack", main, chain=False)
            yield "last look", "Airflow: ack looks for the last time", last
        if main.task in ("batch", "ack"):
            after = self._begin_task(dead, "process", main)
            yield "clear", "Airflow: process is cleared", after
        over = dead._replace(over=put(dead.over, A, True))
        yield "over", "Airflow: the run is over", over

    def _begin_task(self, state: State, task: str, before: Thread | None, **more: Any) -> State:
        count = state.executions + 1
        gen = -1 if before is None or task == "process" else before.gen
        thread = self.thread(f"A{count}", A, task, gen, **more)
        return state._replace(threads=(*state.threads, thread), executions=count)

    def _continue_run(self, state: State, thread: Thread) -> State:
        """Continues with the task that follows one that has ended."""
        ended = next((item for item in state.threads if item.name == thread.name), None)
        if ended is None or ended.at != END:
            return state
        if not ended.chain or ended.task == "ack":
            threads = tuple(thread for thread in state.threads if thread.name != ended.name)
            state = state._replace(threads=threads)
            if ended.task == "ack" and ended.chain:
                state = state._replace(over=put(state.over, ended.run, True))
            return state
        batch = ended.task == "process" and self.batchers
        task = "batch" if batch else "ack"
        fresh = self.thread(ended.name, ended.run, task, ended.gen)
        return set_thread(state, ended, **fresh._asdict())

    # -- the process task ----------------------------------------------------------------------

    def _sweep(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        todo = []
        broken = ""
        for number, gen in enumerate(state.gens):
            if not gen.listed or number == thread.gen:
                continue
            if gen.report:
                state = set_gen(state, number, listed=False)
                continue
            own = gen.run == thread.run
            if not own and not state.over[gen.run] and self.drop != "is_over":
                continue
            void = own and self.batchers and (not gen.intent or self.drop == "settling")
            if void and gen.intent and any(gen.outcome):
                broken = "no outcome is contradicted"
            todo.append((number, void))
        after = "retain" if any(state.balanced) else "list"
        at, then = ("decide", after) if todo else (after, "")
        state = set_thread(state, thread, at=at, settling=tuple(todo), then=then)
        dead = ", ".join(str(number) for number, _ in todo) or "none"
        yield f"dead generations: {dead}", state._replace(broken=broken)

    def _retain(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        broken = ""
        for gen in state.gens:
            old = gen.record and state.balanced[gen.run] and gen.run != thread.run
            if old and not gen.report and self.drop == "retention":
                broken = "what is unsettled stays in staging"
        note = "runs that were marked balanced, but for unsettled ones"
        yield note, set_thread(state, thread, at="list")._replace(broken=broken)

    def _list(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        gen = thread.gen
        if gen < 0:
            gen = len(state.gens)
            none = (False,) * self.messages
            fresh = Gen(thread.run, False, False, none, none, ("",) * self.messages)
            state = state._replace(gens=(*state.gens, fresh))
        first = "record" if self.drop == "listed first" else "listed"
        state = set_gen(state, gen, **{first: True})
        yield (
            f"the copy of generation {gen} in _open/",
            set_thread(state, thread, gen=gen, at="open"),
        )

    def _open(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        state = set_gen(state, thread.gen, record=True, listed=True)
        yield "its record", set_thread(state, thread, at="receive")

    @staticmethod
    def stop_source(state: State, thread: Thread) -> tuple[str, State]:
        """Stops the source; its messages are handled next."""
        note = "the queue is empty, or the budget spent"
        return note, set_thread(state, thread, at="stage", memo=())

    def release(self, state: State, thread: Thread) -> State:
        """Fails the task; its generation's messages are released."""
        return set_thread(
            state,
            thread,
            task="given back",
            at="decide",
            settling=((thread.gen, True),),
            then=END,
            memo=(),
        )

    def _stage(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        gen = state.gens[thread.gen]
        if self.batchers:
            yield "the messages for batchers", set_thread(state, thread, at="look")
            return
        for results in product(*(self.results_of(gen, place) for place in range(self.messages))):
            after = set_gen(state, thread.gen, outcome=results)
            yield f"the entries: {_listed(results)}", set_thread(after, thread, at="look")

    def results_of(self, gen: Gen, message: int) -> Sequence[str]:
        """Returns the possible results of a callback."""
        if not gen.got[message]:
            return ("",)
        return ("ok",) if gen.marked[message] else self.results

    def _look(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        intent = state.gens[thread.gen].intent
        if intent and self.drop != "publish":
            yield "settling has begun: it releases", self.release(state, thread)
            return
        broken = "no manifest is published of what is being settled" if intent else ""
        state = set_thread(state, thread, at="publish")._replace(broken=broken)
        yield "settling has not begun", state

    def _publish(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        state = set_gen(state, thread.gen, manifest=True)
        if self.batchers and any(state.gens[thread.gen].got):
            state = set_thread(state, thread, at=END, memo=())
        else:
            own = ((thread.gen, False),)
            state = set_thread(state, thread, at="decide", settling=own, then=END, memo=())
        yield "the manifest", state

    # -- the batch task ------------------------------------------------------------------------

    def _plan(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        gen = state.gens[thread.gen] if thread.gen >= 0 else None
        if gen is None or not gen.manifest or gen.intent:
            yield "the generation is left out", set_thread(state, thread, at=END)
            return
        yield "the plan", set_thread(state, thread, at="try")

    def _try(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number = state.tries[thread.run] + 1
        state = state._replace(tries=put(state.tries, thread.run, number))
        changes = self._next(state, thread, 0)
        yield f"try {number}", set_thread(state, thread, number=number, **changes)

    def _next(self, state: State, thread: Thread, place: int) -> dict[str, Any]:
        """Goes to the next batch without an outcome."""
        gen = state.gens[thread.gen]
        while place < self.messages and (not gen.got[place] or gen.outcome[place]):
            place += 1
        at = "begin" if place < self.messages else "stand in"
        return {"at": at, "place": place if at == "begin" else 0, "result": ""}

    def _refusal(self, state: State, thread: Thread) -> str:
        gen = state.gens[thread.gen]
        if state.tries[thread.run] > thread.number and self.drop != "try":
            return "a later try has begun"
        if (gen.intent or gen.report) and self.drop != "journal":
            return "it is being settled"
        if gen.late and self.drop != "deadline":
            return "its lease has lapsed"
        return ""

    def _begin(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        refused = self._refusal(state, thread)
        if refused:
            at = END if refused.startswith("a later") else "stand in"
            yield f"{refused}: it stops", set_thread(state, thread, at=at, place=0)
            return
        broken = ""
        if state.tries[thread.run] > thread.number:
            broken = "a batch is begun by the last try alone"
        elif self.custody.ended(state, thread.gen) or state.gens[thread.gen].late:
            broken = "what a run no longer holds reaches no handle_batch"
        state = set_thread(state, thread, at="handle")._replace(broken=broken)
        yield f"batch {thread.place} is owned", state

    def _handle(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        if self.drop == "record":  # a batch without an outcome counts as if it had one
            yield (
                "ok, and nothing is recorded",
                set_thread(state, thread, **self._next(state, thread, thread.place + 1)),
            )
            return
        for result in self.results_of(state.gens[thread.gen], thread.place):
            note = f"batch {thread.place}: {result}"
            yield note, set_thread(state, thread, at="check", result=result)

    def _check(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        refused = self._refusal(state, thread)
        if refused:
            at = END if refused.startswith("a later") else "stand in"
            yield (
                f"{refused}: nothing is recorded",
                set_thread(state, thread, at=at, place=0, result=""),
            )
        else:
            yield "it is owned still", set_thread(state, thread, at="record")

    def _record(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        gen, place = state.gens[thread.gen], thread.place
        existing, broken = gen.outcome[place], ""
        if not existing or self.drop == "outcome":
            note = f"the outcome of batch {place}: {thread.result}"
            if existing and existing != thread.result:
                broken = "no outcome is contradicted"
            outcome = put(gen.outcome, place, thread.result)
            state = set_gen(state, thread.gen, outcome=outcome)
        else:
            note = f"the outcome {existing!r} of batch {place} stands"
        changes = self._next(state, thread, place + 1)
        yield note, set_thread(state, thread, **changes)._replace(broken=broken)

    def _stand_in(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        yield "the sensor is active", set_thread(state, thread, at=END)
        gen = state.gens[thread.gen]
        decision = self.decision(gen, void=False)
        if (decision.complete or gen.intent) and not gen.report:
            after = set_thread(
                state,
                thread,
                at="intent",
                decision=decision,
                settling=((thread.gen, False),),
                then=END,
            )
            yield "no sensor has looked: it settles", after

    # -- the sensor ----------------------------------------------------------------------------

    def _ack(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        todo = tuple(
            (number, False)
            for number, item in enumerate(state.gens)
            if item.run == thread.run and item.record and not item.report
        )
        at = "decide" if todo else "report"
        note = f"unsettled: {', '.join(str(number) for number, _ in todo) or 'none'}"
        yield note, set_thread(state, thread, at=at, settling=todo, then="report")

    def _report(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        own = [gen for gen in state.gens if gen.run == thread.run and gen.record]
        balanced = all(step.report and _balances(step) for step in own)
        if balanced and self.retention:
            state = state._replace(balanced=put(state.balanced, thread.run, True))
        yield f"balanced: {balanced}", set_thread(state, thread, at=END)

    # -- settling ------------------------------------------------------------------------------

    def decision(self, gen: Gen, *, void: bool) -> Decision:
        """Decides by the current records."""
        if self.drop == "outcomes" or (not gen.manifest and self.drop != "manifest"):
            return Decision(False, False, ("release",) * self.messages, void)
        verdicts = []
        for got, outcome in zip(gen.got, gen.outcome, strict=True):
            verdict = {"ok": "ack", "": "release"}.get(outcome, outcome)
            if not outcome and self.drop in ("rest", "manifest", "record"):
                verdict = "ack"
            verdicts.append("" if not got else "release" if void else verdict)
        recorded = all(not got or was for got, was in zip(gen.got, gen.outcome, strict=True))
        return Decision(True, recorded and not void, tuple(verdicts), void)

    def _decide(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, void = thread.settling[0]
        decision = self.decision(state.gens[number], void=void)
        note = f"generation {number}: {_listed(decision.verdicts)}"
        note += "" if decision.published else ", no manifest"
        released = zip(state.gens[number].outcome, decision.verdicts, strict=True)
        broken = ""
        if (
            state.gens[number].manifest
            and not void
            and any(o and v == "release" for o, v in released)
        ):
            broken = "no outcome is contradicted"
        state = set_thread(state, thread, at="intent", decision=decision)
        yield note, state._replace(broken=broken)

    def _intent(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, _ = thread.settling[0]
        if state.gens[number].report:
            state = set_gen(state, number, listed=False)
            yield f"generation {number} is settled", self._settled(state, thread)
            return
        if self.drop != "intent":
            state = set_gen(state, number, intent=True)
        if self.drop == "forget":
            state = set_gen(state, number, listed=False)
        yield f"the intent of generation {number}", set_thread(state, thread, at="settle", memo=())

    def _journal(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, _ = thread.settling[0]
        existing = state.gens[number].report
        note, broken = f"the report of generation {number}: {_listed(thread.report)}", ""
        if existing and self.drop != "report":
            note = f"the report {_listed(existing)} of generation {number} stands"
        else:
            if existing and existing != thread.report:
                broken = "the first report stands"
            state = set_gen(state, number, report=thread.report, intent=True)
        state = set_thread(state, thread, at="forget", report=(), memo=())
        yield note, state._replace(broken=broken)

    def _forget(self, state: State, thread: Thread) -> Iterator[tuple[str, State]]:
        number, _ = thread.settling[0]
        state = set_gen(state, number, listed=False)
        yield f"the copy of generation {number} in _open/", self._settled(state, thread)

    @staticmethod
    def _settled(state: State, thread: Thread) -> State:
        """Continues with the next generation to settle."""
        left = thread.settling[1:]
        at, then = ("decide", thread.then) if left else (thread.then, "")
        return set_thread(
            state, thread, at=at, then=then, settling=left, decision=None, report=(), memo=()
        )

    def check_verdict(self, state: State, thread: Thread, message: int, verdict: str) -> str:
        """Returns the promise that a verdict breaks if carried out now; empty if none."""
        number, _ = thread.settling[0]
        gen = state.gens[number]
        if verdict == "ack" and not gen.manifest:
            return "an incomplete generation is never acknowledged"
        if verdict == "ack" and gen.outcome[message] != "ok":
            return "nothing is acknowledged without a recorded success"
        if verdict in ("retry", "dead") and gen.outcome[message] != verdict:
            return "no outcome is contradicted"
        return ""


def _balances(gen: Gen) -> bool:
    """Returns whether a report names as many messages as the manifest, where there is one."""
    return not gen.manifest or sum(map(bool, gen.report)) == sum(gen.got)


def _listed(values: Sequence[str]) -> str:
    return " ".join(value or "-" for value in values)
