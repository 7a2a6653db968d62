"""Points of fault injection: external calls of a process, and their names.

A *call* is a kind and a target, such as ``link …/manifest.json``.  Random parts of a target are
numbered in the order of first use, so that a call has the same name in every run.  A *point* is the
n-th such call of one task execution.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from airflow_broadway.core.formats.files import TEMPORARY

#: Random parts of the names of files, queues and statements.
_RANDOM = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<![0-9A-Za-z])(?:[0-9a-f]{8}|[0-9a-f]{12,})(?![0-9A-Za-z])"
)
_TIMESTAMP = re.compile(r"\d{8}T\d{6,}Z?|\d{4}-\d\d-\d\d|(?<!\w)\d{10}(?!\w)")
#: The text form of an injection.
_STRIKE = re.compile(
    r"(?P<execution>\S+) (?P<kind>\S+)(?: (?P<target>.+))? #(?P<nth>[1-9]\d*): (?P<fault>[a-z ]+)"
)
_TEMPORARY = re.compile(re.escape(TEMPORARY) + r"\w+")


class Call(NamedTuple):
    """An external call.

    :param kind: The operation, such as ``"link"``, ``"COMMIT"`` or ``"handle_batch"``.
    :param target: The object, without random parts.
    """

    kind: str
    target: str

    def __str__(self) -> str:
        return f"{self.kind} {self.target}" if self.target else self.kind


class Traits(NamedTuple):
    """The properties of a call that determine its possible faults.

    :param changes: Whether it has effects: dying at a call without effects is the same as dying
        after the last call with effects.
    :param faults: Those of its faults that are impossible at other calls, comma-separated: half of
        it is made, the disk is full, it hangs, and those of a client.
    :param locked_before: Whether the process holds a lock before the call that is released only by
        its death: while it is suspended there, recovery is impossible.
    :param locked_after: The same after the call.
    :param in_callback: Whether it is a callback, or within one: made by the pipeline.
    """

    changes: bool = True
    faults: str = ""
    locked_before: bool = False
    locked_after: bool = False
    in_callback: bool = False


class Point(NamedTuple):
    """One call of one task execution.

    :param execution: ``run/task/try``, such as ``"one/process/1"``.
    :param nth: Its number among equal calls of this execution, from 1.
    """

    execution: str
    call: Call
    nth: int
    traits: Traits = Traits()

    def __str__(self) -> str:
        return f"{self.execution} {self.call} #{self.nth}"


class Fault(StrEnum):
    """A fault that is injected at a point."""

    KILLED_BEFORE = "killed before"
    KILLED_HALFWAY = "killed halfway"
    KILLED_AFTER = "killed after"
    #: The process is suspended, and resumes after others have recovered from its death: a zombie.
    SUSPENDED_BEFORE = "suspended before"
    SUSPENDED_AFTER = "suspended after"
    #: The call fails without effect.
    ERROR = "error"
    #: The call takes effect, but fails: its response is lost.
    RESPONSE_LOST = "response lost"
    #: The call times out; it may still take effect later.
    TIME_OUT = "timed out"
    #: The client retries it, as after a lost response, and returns the second response.
    SENT_TWICE = "sent twice"
    #: The server rejects it because of a concurrent request.
    CONFLICT = "conflict"
    #: A list lacks the newest entries.
    STALE = "stale list"
    #: The disk is full from here on.
    DISK_FULL = "disk full"
    #: The clock is an hour off from here on.
    CLOCK_AHEAD = "clock ahead"
    CLOCK_BEHIND = "clock behind"
    #: The broker restarts before the call.
    BROKER_RESTARTS = "broker restarts"


class Injection(NamedTuple):
    """A fault to inject at a point."""

    point: Point
    fault: Fault

    def __str__(self) -> str:
        return f"{self.point}: {self.fault.value}"

    @property
    def fails_callbacks(self) -> bool:
        """Whether it may fail a callback of the execution."""
        faults = (Fault.ERROR, Fault.RESPONSE_LOST, Fault.TIME_OUT)
        return self.fault is Fault.DISK_FULL or (
            self.point.traits.in_callback and self.fault in faults
        )

    @classmethod
    def parse(cls, text: str) -> Injection:
        """Parses the text of :meth:`__str__`, which lacks the traits.

        :raises ValueError: If the text is invalid.
        """
        match = _STRIKE.fullmatch(text.strip())
        if match is None or match["fault"] not in set(Fault):
            names = ", ".join(Fault)
            raise ValueError(
                f"expected RUN/TASK/TRY CALL #N: FAULT, with one of {names}; got: {text!r}"
            )
        call = Call(match["kind"], match["target"] or "")
        return cls(Point(match["execution"], call, int(match["nth"])), Fault(match["fault"]))


class TargetNames:
    """Numbers the random parts of targets in the order of first use by one execution."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def normalize(self, target: str) -> str:
        """Returns the target with random parts replaced."""
        return _RANDOM.sub(
            self._number, _TIMESTAMP.sub("<timestamp>", _TEMPORARY.sub(TEMPORARY, target))
        )

    def _number(self, match: re.Match[str]) -> str:
        return f"<{self._known.setdefault(match[0], len(self._known) + 1)}>"
