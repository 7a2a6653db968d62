"""A breadth-first search through all states of a model: the first bad one has the shortest trace.

A model's states are hashable values.  Where a step concerns nobody but who takes it, the model says
so, and the search follows that step alone: to put others before it gives the same states later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Step(NamedTuple, Generic[S]):
    """One atomic action.

    :param name: Who does what, for people: the last word before the colon names a function.
    :param state: The state after it.
    :param alone: The thread, if the step changes only what no other reads, and can be taken at any
        time; else empty.
    """

    name: str
    state: S
    alone: str = ""


class Model(Protocol[S]):
    """A system that can be explored."""

    def start(self) -> S: ...

    def steps(self, state: S) -> Sequence[Step[S]]:
        """All that can happen next."""
        ...

    def wrong(self, state: S) -> str:
        """Which promise the state breaks; empty if none."""
        ...


class TooMany(Exception):
    """There are more states than were allowed for."""


@dataclass(frozen=True)
class Broken(Generic[S]):
    """A broken promise, and the shortest way to it."""

    promise: str
    trace: Sequence[str]
    state: S

    def __str__(self) -> str:
        steps = "\n".join(f"{number:3}. {name}" for number, name in enumerate(self.trace, 1))
        return f"{self.promise}\n{steps}\n{self.state}"


@dataclass(frozen=True)
class Explored(Generic[S]):
    """The result of a search.

    :param depth: The number of steps to the state that is furthest away.
    """

    states: int
    steps: int
    depth: int
    broken: Broken[S] | None


def explore(
    model: Model[S],
    *,
    most: int,
    then: Callable[[S], tuple[str, Sequence[str]] | None] = lambda state: None,
) -> Explored[S]:
    """Looks at every state that can be reached, nearest first, until one is wrong.

    :param most: States to look at, at most.
    :param then: Looks further from each state that is right: which promise is broken after it, and
        by which steps; ``None`` if all is well.
    :raises TooMany: If there are more states.
    """
    start = model.start()
    came: dict[S, tuple[S, str] | None] = {start: None}
    level, depth, count = [start], 0, 0
    while level:
        following: list[S] = []
        for state in level:
            promise = model.wrong(state)
            later = None if promise else then(state)
            if promise or later is not None:
                promise, more = later or (promise, ())
                trace = [*_trace(came, state), *more]
                return Explored(len(came), count, depth, Broken(promise, trace, state))
            steps = model.steps(state)
            alone = next((step.alone for step in steps if step.alone), "")
            for step in steps:
                if step.alone != alone:
                    continue
                count += 1
                if step.state not in came:
                    came[step.state] = state, step.name
                    following.append(step.state)
        if len(came) > most:
            raise TooMany(f"more than {most:,} states: {len(came):,} at depth {depth}")
        level = following
        depth += bool(following)
    return Explored(len(came), count, depth, None)


def _trace(came: dict[S, tuple[S, str] | None], state: S) -> list[str]:
    names: list[str] = []
    while (before := came[state]) is not None:
        state, name = before
        names.append(name)
    return names[::-1]
