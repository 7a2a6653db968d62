"""The model's state: staging, a broker, running tasks, and their states in Airflow."""

from __future__ import annotations

from typing import Any, NamedTuple

#: The runs of a Dag: one that meets with trouble, one next to or after it, and one that comes when
#: all else is dead.
A, B, C = 0, 1, 2


class Decision(NamedTuple):
    """A settler's decision by the records that it read.

    :param published: Whether there was a manifest.
    :param complete: Whether each message had an outcome.
    :param verdicts: By message: ``ack``, ``retry``, ``dead`` or ``release``; empty if it is not of
        the generation.
    :param void: Whether what is recorded counts no more.
    """

    published: bool
    complete: bool
    verdicts: tuple[str, ...]
    void: bool


class Gen(NamedTuple):
    """One generation: its files in staging, and its state at the broker and by the clock.

    :param listed: Its copy lies in ``_open/``.
    :param record: ``generations/<generation>.json`` is there.
    :param got: By message: received for it, and handed to callbacks.
    :param marked: Of these, those that were received as redelivered.
    :param outcome: By message, what is recorded: ``ok``, ``retry``, ``dead``; or nothing.
    :param late: Its deadline has passed.
    :param report: The contents of ``journal-settled.json``, by message; empty without that file.
    :param custody: What the broker, and the producer's own files, know of it.
    """

    run: int
    listed: bool
    record: bool
    got: tuple[bool, ...]
    marked: tuple[bool, ...]
    outcome: tuple[str, ...]
    manifest: bool = False
    intent: bool = False
    report: tuple[str, ...] = ()
    late: bool = False
    custody: Any = ""


class Thread(NamedTuple):
    """One execution of a task of a run, and what its process knows.

    :param at: Its next step.
    :param task: ``process``, ``batch`` or ``ack``; ``given back`` for a process task that fails.
    :param chain: Whether Airflow takes it for alive, and goes on with what it returns; else it is a
        zombie: it may go on with its task at any time, or never.
    :param number: Its number among the tries of its task.
    :param place: The message it is at.
    :param result: What the callback made of it.
    :param settling: The generations that it settles next, and whether they are void.
    :param then: Its step once they are settled.
    :param report: What its settling of the first of them has come to, by message.
    :param memo: What the custodian knows.
    """

    name: str
    run: int
    task: str
    at: str
    gen: int = -1
    chain: bool = True
    number: int = 0
    place: int = 0
    result: str = ""
    settling: tuple[tuple[int, bool], ...] = ()
    decision: Decision | None = None
    then: str = ""
    report: tuple[str, ...] = ()
    memo: Any = ()


class State(NamedTuple):
    """All of it.

    :param broker: By message, what the broker has; its shape is the custody's.
    :param tries: By run, the number of the try that owns its batches.
    :param over: By run, whether Airflow calls it over.
    :param balanced: By run, whether it was marked so: then retention may remove it.
    :param trouble: How much may still go wrong: kills, clears, time-outs.
    :param lapses: How many deadlines may still pass.
    :param executions: How many executions of the first run there were.
    :param broken: The promise that the last step broke.
    """

    gens: tuple[Gen, ...]
    threads: tuple[Thread, ...]
    broker: tuple[Any, ...]
    trouble: int
    lapses: int
    tries: tuple[int, ...] = (0, 0, 0)
    over: tuple[bool, ...] = (False, False, False)
    balanced: tuple[bool, ...] = (False, False, False)
    executions: int = 1
    broken: str = ""


def put(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    """A tuple with one place changed."""
    return (*values[:place], value, *values[place + 1 :])


def set_thread(state: State, thread: Thread, **changes: Any) -> State:
    """The state with a thread's changed."""
    changed = thread._replace(**changes)
    threads = tuple([changed if other.name == thread.name else other for other in state.threads])
    return state._replace(threads=threads)


def set_gen(state: State, number: int, **changes: Any) -> State:
    """The state with a generation's changed."""
    return state._replace(gens=put(state.gens, number, state.gens[number]._replace(**changes)))


def set_message(state: State, message: int, value: Any) -> State:
    """The state with a message's changed at the broker."""
    return state._replace(broker=put(state.broker, message, value))
