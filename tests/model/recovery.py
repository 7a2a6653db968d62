"""The end is reachable from every state: all processes die, and Airflow continues.

A task that is tried again, a sensor alone, or the next run releases the held messages; then leases
lapse, and one more run receives the backlog.  After that nothing may be left over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.model.protocol import Run
from tests.model.state import A, C, State, Thread, put

#: Steps of one execution, at most.
MOST = 400


class Recovery:
    """Continues a run's states to their end, each once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: dict[State, tuple[str, Sequence[str]] | None] = {}
        #: States from which the last run completes everything.
        self._recoverable: set[State] = set()

    def __call__(self, state: State) -> tuple[str, Sequence[str]] | None:
        """Returns the promise that is broken on the way, and the steps; ``None`` if none is."""
        dead = state._replace(
            threads=(),
            trouble=-1,
            lapses=-1,
            tries=(0, 0, 0),
            over=(False, True, False),
            executions=0,
        )
        if dead not in self._known:
            self._known[dead] = self._search(dead)
        return self._known[dead]

    def _search(self, dead: State) -> tuple[str, Sequence[str]] | None:
        while (sent := self._run.custody.send(dead)) is not None:
            dead = sent
        run = self._run
        gen = max((n for n, item in enumerate(dead.gens) if item.run == A), default=-1)
        first = [
            run.thread("next run", C),
            run.thread("next try", A),
            run.thread("next batch", A, "batch", gen),
            run.thread("next ack", A, "ack", gen),
        ]
        for thread in first if run.batchers else [first[0], first[1], first[3]]:
            after = self._complete(dead, thread)
            if after is not None:
                return after
        return None

    def _complete(self, state: State, thread: Thread) -> tuple[str, Sequence[str]] | None:
        names = ["all processes die"]
        over = put(state.over, A, thread.run != A)
        state, promise = self._run_through(state._replace(over=over), thread, names)
        if promise:
            return promise, names
        names.append("all leases lapse")
        state = self._run.custody.lapse(state)._replace(over=(True, True, False))
        if state in self._recoverable:
            return None
        end, promise = self._run_through(state, self._run.thread("last run", C), names)
        promise = promise or self._leftovers(end)
        if promise:
            return promise, names
        self._recoverable.add(state)
        return None

    def _run_through(self, state: State, thread: Thread, names: list[str]) -> tuple[State, str]:
        """Executes a task, and those after it; returns the state and the broken promise."""
        state = state._replace(threads=(thread,))
        for name, reached in self._steps(state):
            names.append(name)
            state = reached
            promise = self._run.violation(state)
            if promise:
                return state, promise
        return state, f"{thread.name} ends" if state.threads else ""

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yields the steps of the only thread, and the broker's steps meanwhile."""
        for _ in range(MOST):
            for event in self._run.custody.events(state):
                state = event.state
                yield event.name, state
                break
            else:
                if not state.threads:
                    return
                step = self._run.steps_of(state, state.threads[0])[0]
                state = step.state
                yield step.name, state

    def _leftovers(self, state: State) -> str:
        for number, gen in enumerate(state.gens):
            if gen.record and not gen.report:
                return f"generation {number} is unsettled in the end"
            if gen.listed:
                return f"generation {number} is on the list of unsettled ones in the end"
        return self._run.custody.leftovers(state)
