"""The model's state: staging, a broker, running tasks, and their states in Airflow."""

from __future__ import annotations

from typing import Any, NamedTuple

#: The runs of a Dag: one with faults, one next to or after it, and one that begins when all else is
#: dead.
A, B, C = 0, 1, 2


class Decision(NamedTuple):
    """A settler's decision by the records that it read.

    :param published: Whether there was a manifest.
    :param complete: Whether each message had an outcome.
    :param verdicts: By message: ``ack``, ``retry``, ``dead`` or ``release``; empty if it is not of
        the generation.
    :param void: Whether the recorded outcomes are discarded.
    """

    published: bool
    complete: bool
    verdicts: tuple[str, ...]
    void: bool


class Gen(NamedTuple):
    """One generation: its files in staging, and its state at the broker and by the clock.

    :param listed: Its copy is in ``_open/``.
    :param record: ``generations/<generation>.json`` exists.
    :param got: By message: received for it, and passed to callbacks.
    :param marked: Of these, those that were received as redelivered.
    :param outcome: By message, its record: ``ok``, ``retry``, ``dead``; or nothing.
    :param late: Its deadline has passed.
    :param report: The contents of ``journal-settled.json``, by message; empty without that file.
    :param custody: Its state at the broker, and in the producer's own files.
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
    """One execution of a task of a run, and its process's memory.

    :param at: Its next step.
    :param task: ``process``, ``batch`` or ``ack``; ``given back`` for a process task that fails.
    :param chain: Whether Airflow treats it as alive, and continues with its result; else it is a
        zombie: it may continue its task at any time, or never.
    :param number: Its number among the tries of its task.
    :param place: Its current message.
    :param result: The callback's result for that message.
    :param settling: The generations that it settles next, and whether they are void.
    :param then: Its step once they are settled.
    :param report: The results of settling the first of them, by message.
    :param memo: The custodian's memory.
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
    """The state of the whole model.

    :param broker: By message, its state at the broker; its shape is the custody's.
    :param tries: By run, the number of the try that owns its batches.
    :param over: By run, whether Airflow calls it over.
    :param balanced: By run, whether it was marked so: then retention may remove it.
    :param trouble: The number of faults still possible: kills, clears, time-outs.
    :param lapses: The number of deadlines that may still pass.
    :param executions: The number of executions of the first run.
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
    """Returns a tuple with one place changed."""
    return (*values[:place], value, *values[place + 1 :])


def set_thread(state: State, thread: Thread, **changes: Any) -> State:
    """Returns the state with a thread's changed."""
    changed = thread._replace(**changes)
    threads = tuple([changed if item.name == thread.name else item for item in state.threads])
    return state._replace(threads=threads)


def set_gen(state: State, number: int, **changes: Any) -> State:
    """Returns the state with a generation's changed."""
    return state._replace(gens=put(state.gens, number, state.gens[number]._replace(**changes)))


def set_message(state: State, message: int, value: Any) -> State:
    """Returns the state with a message's changed at the broker."""
    return state._replace(broker=put(state.broker, message, value))
