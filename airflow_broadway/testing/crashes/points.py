"""Where a process can die: the calls by which it touches the world, and their names.

A *call* is a kind and a target, such as ``link …/manifest.json``.  What is random in a target is
numbered in the order of first use, so a call has the same name in every run.  A *point* is the
n-th such call of one execution of a task.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from airflow_broadway.core.formats.files import TEMPORARY

#: What is random in the names of files, queues and statements.
_RANDOM = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<![0-9A-Za-z])(?:[0-9a-f]{8}|[0-9a-f]{12,})(?![0-9A-Za-z])"
)
_INSTANT = re.compile(r"\d{8}T\d{6,}Z?|\d{4}-\d\d-\d\d|(?<!\w)\d{10}(?!\w)")
#: A strike as it is written.
_STRIKE = re.compile(
    r"(?P<execution>\S+) (?P<kind>\S+)(?: (?P<target>.+))? #(?P<nth>[1-9]\d*): (?P<what>[a-z ]+)"
)
_TEMPORARY = re.compile(re.escape(TEMPORARY) + r"\w+")


class Call(NamedTuple):
    """One way to touch the world.

    :param kind: What is done, such as ``"link"``, ``"COMMIT"`` or ``"handle_batch"``.
    :param target: To what, without what is random in it.
    """

    kind: str
    target: str

    def __str__(self) -> str:
        return f"{self.kind} {self.target}" if self.target else self.kind


class Traits(NamedTuple):
    """What can be done to a call, and makes a difference.

    :param changes: Whether the world is another after it: dying at a call that only looks is dying
        after the last one that changed something.
    :param divides: Whether it can be done by half.
    :param room: Whether it fails on a full disk.
    :param locked_before: Whether a lock is held before it that only the process's death ends: who
        sleeps there lets nobody recover.
    :param locked_after: The same after it.
    :param own: Whether it is a callback, or made by one: the pipeline's own, not the package's.
    :param hangs: Whether it has a time-out.
    :param others: What else can happen to it, comma-separated.
    """

    changes: bool = True
    divides: bool = False
    room: bool = False
    locked_before: bool = False
    locked_after: bool = False
    own: bool = False
    hangs: bool = False
    others: str = ""


class Point(NamedTuple):
    """One call of one execution of a task.

    :param execution: ``run/task/try``, such as ``"one/process/1"``.
    :param nth: Which of the equal calls of this execution it is, from 1.
    """

    execution: str
    call: Call
    nth: int
    traits: Traits = Traits()

    def __str__(self) -> str:
        return f"{self.execution} {self.call} #{self.nth}"


class What(StrEnum):
    """What happens to a process at a point."""

    KILLED_BEFORE = "killed before"
    KILLED_HALFWAY = "killed halfway"
    KILLED_AFTER = "killed after"
    #: It stands still, and goes on once others have recovered from its death: a zombie.
    ASLEEP_BEFORE = "asleep before"
    ASLEEP_AFTER = "asleep after"
    #: The call raises and does nothing.
    ERROR = "error"
    #: The call does its work and raises all the same.
    ANSWER_LOST = "answer lost"
    #: The call raises that its time-out is over; what it asked for may be done later all the same.
    TIME_OUT = "timed out"
    #: The client sends it again, as after a lost answer, and tells of the second answer.
    SENT_TWICE = "sent twice"
    #: A server refuses it, for it says that another one is at work there.
    CONFLICT = "conflict"
    #: A list lacks what is newest.
    STALE = "stale list"
    #: From here on the process writes nothing more.
    DISK_FULL = "disk full"
    #: From here on its clock is an hour off.
    CLOCK_AHEAD = "clock ahead"
    CLOCK_BEHIND = "clock behind"
    #: The broker ends before the call, and is there again when it is made.
    BROKER_RESTARTS = "broker restarts"

    @property
    def kills(self) -> bool:
        return self in (What.KILLED_BEFORE, What.KILLED_HALFWAY, What.KILLED_AFTER)

    @property
    def sleeps(self) -> bool:
        return self in (What.ASLEEP_BEFORE, What.ASLEEP_AFTER)


class Strike(NamedTuple):
    """What happens, and at which point."""

    point: Point
    what: What

    def __str__(self) -> str:
        return f"{self.point}: {self.what.value}"

    @property
    def fails_callbacks(self) -> bool:
        """Whether a callback of the execution may fail of it."""
        faults = (What.ERROR, What.ANSWER_LOST, What.TIME_OUT)
        return self.what is What.DISK_FULL or (self.point.traits.own and self.what in faults)

    @classmethod
    def parse(cls, text: str) -> Strike:
        """Read what :meth:`__str__` wrote; the traits are not told.

        :raises ValueError: If it is none.
        """
        found = _STRIKE.fullmatch(text.strip())
        if found is None or found["what"] not in set(What):
            whats = ", ".join(What)
            raise ValueError(
                f"expected RUN/TASK/TRY CALL #N: WHAT, where WHAT is one of {whats}; got: {text!r}"
            )
        call = Call(found["kind"], found["target"] or "")
        return cls(Point(found["execution"], call, int(found["nth"])), What(found["what"]))


class Names:
    """Gives random parts of targets numbers, in the order in which one execution uses them."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def plain(self, target: str) -> str:
        """The target without what is random in it."""
        return _RANDOM.sub(
            self._number, _INSTANT.sub("<instant>", _TEMPORARY.sub(TEMPORARY, target))
        )

    def _number(self, found: re.Match[str]) -> str:
        return f"<{self._known.setdefault(found[0], len(self._known) + 1)}>"
