"""Ownership: whether this try of a task may still act for its run.

A retry may overlap the previous try: after a SIGKILL of the task its JVM lives on for up to a
minute, and so may a worker that Airflow has lost.  Meanwhile the broker may have redelivered the
messages, and users clear tasks.  So three conditions are checked in the run's folder before each
batch, and again before its outcome is recorded: no higher try has a file there, settling or
releasing the batch's generations has not begun, and their leases have not lapsed.  Failures are
rare, and a batch that is stopped here costs nothing: its messages are redelivered.

A check is valid for a second from its start: a process that is suspended during a check may start
the batch that it checked, and no other.  A Spark driver checks again before it records, for its
batches are large, and its JVM often outlives its task.  A Python batcher does not, for it may have
a thousand batches of a few milliseconds; and any process may be suspended between check and record.
A late outcome does no harm: its generation was settled by the earlier outcomes, and its messages
are redelivered, marked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.files import Files

#: The way out in errors of a run that no longer holds its messages.
CURE = "this run no longer holds its messages: clear `process`"


class OwnershipLost(LeaseLapsed):
    """A later try of the task has begun, so this one stops."""


def highest_try(files: Files, name: str, folder: str = "work") -> int:
    """Returns the highest try of a task that has a file in ``folder``; 0 if none has."""
    pattern = re.compile(re.escape(name) + r"-(\d+)\.json")
    matches = (pattern.fullmatch(file) for file in files.list(folder))
    return max((int(match[1]) for match in matches if match), default=0)


def begin_try(
    files: Files, name: str, text: Callable[[int], str], folder: str = "work"
) -> tuple[int, str]:
    """Creates the file of a new try of a task, which takes ownership from all earlier tries.

    Its number rises over retries and clears alike.

    :param text: Returns the file's text, by the try's number.
    :returns: The number, and the file's path.
    """
    while True:
        number = highest_try(files, name, folder) + 1
        path = paths.of_try(name, number, folder)
        if files.create(path, text(number)):
            return number, path


class Ownership:
    """The right of one try of a task to act; used from many threads.

    :param name: The task's name in the staging folder; empty: there are no other tries.
    :param try_number: The number of this try.
    :param folder: The folder of its tries.
    :param fresh_for: Seconds for which a check is valid.
    """

    def __init__(
        self,
        files: Files,
        name: str = "",
        try_number: int = 0,
        *,
        folder: str = "work",
        clock: Clock | None = None,
        fresh_for: float = 1.0,
    ) -> None:
        self._files = files
        self._name = name
        #: The number of this try.
        self.try_number = try_number
        self._folder = folder
        self._clock = clock or SystemClock()
        self._fresh_for = fresh_for
        self._passed: dict[str, float] = {}
        self._leases: dict[str, Lease] = {}

    def check_try(self, *, fresh: bool = False) -> None:
        """Checks that no later try has begun.

        :raises OwnershipLost: Naming the later try.
        """
        if not self._name or (not fresh and self._has_passed("try")):
            return
        began = self._clock.monotonic()
        highest = highest_try(self._files, self._name, self._folder)
        if highest > self.try_number:
            raise OwnershipLost(
                f"try {highest} of {self._name!r} has begun, so try {self.try_number}"
                " stops here and records nothing more"
            )
        self._passed["try"] = began

    def check(self, generations: Iterable[str], *, fresh: bool = False) -> None:
        """Checks that this try may handle, or record, a batch of these generations.

        :param fresh: Whether to ignore earlier checks.
        :raises OwnershipLost: If a later try has begun.
        :raises LeaseLapsed: If a generation is settled, released or lapsed.
        """
        self.check_try(fresh=fresh)
        for generation in generations:
            if fresh or not self._has_passed(generation):
                began = self._clock.monotonic()
                names = self._files.list(generation)
                for path in (paths.settled(generation), paths.intent(generation)):
                    if path.rpartition("/")[2] in names:
                        raise LeaseLapsed(
                            f"generation {generation} was settled or released; {CURE}"
                        )
                self._passed[generation] = began
            self._check_lease(generation)

    def _check_lease(self, generation: str) -> None:
        # A deadline only ever moves later, so one in the future needs no second read.
        lease = self._leases.get(generation)
        if lease is None or lease.deadline <= self._clock.now():
            lease = self._leases[generation] = self._read_lease(generation)
        if lease.deadline <= self._clock.now():
            raise LeaseLapsed(
                f"the lease of generation {generation} lapsed at"
                f" {lease.deadline.isoformat(timespec='seconds')}; {CURE}"
            )

    def _read_lease(self, generation: str) -> Lease:
        try:
            return Lease.from_json(json.loads(self._files.read(paths.lease(generation))))
        except FileNotFoundError:
            pass
        try:
            manifest = json.loads(self._files.read(paths.manifest(generation)))
        except FileNotFoundError:
            raise LeaseLapsed(f"generation {generation} has no manifest; {CURE}") from None
        return Lease.from_json(manifest["lease"])

    def _has_passed(self, key: str) -> bool:
        return self._clock.monotonic() - self._passed.get(key, float("-inf")) < self._fresh_for
