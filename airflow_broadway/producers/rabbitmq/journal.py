"""What settling has done, kept in staging so that a killed settlement goes on where it was.

One folder per generation, ``<staging>/rabbitmq/<queue>/<generation>/`` (both hashed), and beside
them ``due/<epoch>-<generation>.json``: when its lease queue may be looked at again::

    opened.json     the lease queue is declared: from now on bundles may be in it
    begun.json      settling publishes failures again: who begins anew may publish them twice
    now-*.json      ids that callbacks settled at once, by action
    settled.json    settling is done but for deleting the lease queue: the report, and the bundles

Losing these files loses no message: bundles that come back are then handled again, marked.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.notes import Notes, digest

__all__ = ["Due", "Journal", "digest"]


class Due(NamedTuple):
    """A lease queue that may be looked at again.

    :param gone: Whether it was found gone before: only its journal is left.
    :param sure: From when on it need not be asked for what shows in no count.
    """

    name: str
    folder: str
    queue: str
    gone: bool
    sure: float


class Journal:
    """The journals of one source queue's generations.

    :param staging: A folder URI; with ``None`` they are kept in memory, for tests and trials.
    """

    def __init__(self, staging: str | None, queue: str) -> None:
        self._memory: dict[str, dict[str, Any]] = {}
        self._notes = None if staging is None else Notes(staging, f"rabbitmq/{digest(queue)}")

    @property
    def durable(self) -> bool:
        """Whether another process sees it."""
        return self._notes is not None

    def note_opened(self, generation: str, queue: str, due: float, sure: float) -> None:
        """Note that a lease queue is there: from now on bundles may be in it.

        :param due: From when on it may be looked at; seconds since the epoch.
        :param sure: From when on it may be deleted if it looks empty.
        """
        value = {"queue": queue, "sure": sure}
        self._write(f"due/{due:.0f}-{digest(generation)}.json", value)
        self._write(f"{digest(generation)}/opened.json", {"queue": queue})

    def opened(self, generation: str) -> str | None:
        """The generation's lease queue, if bundles may be in it."""
        value = self._read(f"{digest(generation)}/opened.json")
        return None if value is None else str(value["queue"])

    def settled(self, generation: str) -> dict[str, Any] | None:
        """What a settlement did, if it got as far: ``{"report", "bundles"}``."""
        return self._read(f"{digest(generation)}/settled.json")

    def note_settled(
        self, generation: str, report: dict[str, Any], bundles: Iterable[str] | None
    ) -> None:
        """Note that all verdicts are carried out.

        :param bundles: The bundles that this is true of; ``None``: all.
        """
        self._write(
            f"{digest(generation)}/settled.json",
            {"report": report, "bundles": None if bundles is None else list(bundles)},
        )

    def begun(self, generation: str) -> bool:
        """Whether a settlement has begun to publish failures again."""
        return self._read(f"{digest(generation)}/begun.json") is not None

    def note_begun(self, generation: str) -> None:
        """Note, before the first, that failures are published again."""
        self._write(f"{digest(generation)}/begun.json", {})

    def note_now(self, generation: str, actions: dict[str, str]) -> None:
        """Note what callbacks settled at once: message id → action."""
        self._write(f"{digest(generation)}/now-{uuid.uuid4().hex}.json", actions)

    def now(self, generation: str) -> dict[str, str]:
        """All that callbacks settled at once."""
        found: dict[str, str] = {}
        for name in self._names(digest(generation)):
            if name.startswith("now-"):
                found.update(self._read(f"{digest(generation)}/{name}") or {})
        return found

    def checked(self) -> dict[str, Any]:
        """When the broker's policies were looked at last, and of what: ``{"at", "what"}``."""
        return self._read("checked.json") or {}

    def note_checked(self, at: float, what: str) -> None:
        """Note that the broker's policies are harmless, or cannot be seen.

        :param at: Seconds since the epoch.
        :param what: What was looked at; another needs another look.
        """
        self._write("checked.json", {"at": at, "what": what})

    def due(self, now: float) -> list[Due]:
        """The lease queues that may be looked at again."""
        found = []
        for name in self._names("due"):
            at, _, folder = name.removesuffix(".json").partition("-")
            if float(at) <= now:
                value = self._read(f"due/{name}")
                if value is not None:
                    gone, sure = bool(value.get("gone")), float(value.get("sure", at))
                    found.append(Due(name, folder, str(value["queue"]), gone, sure))
        return found

    def put_off(self, due: Due, at: float, *, gone: bool) -> None:
        """Look at a lease queue again from ``at`` on.

        :param gone: Whether it is gone, so that only its journal is left.
        """
        value = {"queue": due.queue, "gone": gone, "sure": due.sure}
        self._write(f"due/{at:.0f}-{due.folder}.json", value)
        self._remove(f"due/{due.name}")

    def forget(self, due: Due) -> None:
        """Remove all that was noted of a generation."""
        self._remove(due.folder)
        self._remove(f"due/{due.name}")

    def dropped(self, generation: str, bundle: str) -> bool:
        """Whether a bundle that came back has nothing left to handle."""
        value = self.settled(generation)
        return value is not None and (value["bundles"] is None or bundle in value["bundles"])

    # -- files ---------------------------------------------------------------------------------

    def put(self, name: str, data: bytes) -> str:
        """Write a file of staged custody, durably; its path.

        :raises StagingError: If there is no staging folder, or it cannot be written.
        """
        if self._notes is None:
            raise StagingError("custody='staged' needs a staging folder")
        return self._notes.put(name, data)

    def get(self, path: str) -> bytes:
        """Read a file that :meth:`put` wrote.

        :raises StagingError: If it is not there.
        """
        if self._notes is None:
            raise StagingError(f"the staged bundle {path} cannot be read without a staging folder")
        return self._notes.get(path)

    def _read(self, name: str) -> dict[str, Any] | None:
        if self._notes is None:
            return self._memory.get(name)
        value = self._notes.read(name)
        return None if value is None else dict(value)

    def _write(self, name: str, value: dict[str, Any]) -> None:
        if self._notes is None:
            self._memory[name] = value
        else:
            self._notes.write(name, value)

    def _remove(self, name: str) -> None:
        if self._notes is not None:
            self._notes.remove(name)

    def _names(self, folder: str) -> list[str]:
        if self._notes is not None:
            return self._notes.names(folder)
        names = {name.partition("/") for name in self._memory}
        return sorted({n[2] for n in names if n[0] == folder} if folder else {n[0] for n in names})
