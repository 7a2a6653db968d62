"""What became of the messages of one generation: a killed settlement goes on where it was.

Each generation has a folder among a producer's :class:`StateFiles`; its name is a hash::

    <generation>/now-*.json      what callbacks settled at once: message id → action
    <generation>/begun.json      settling has begun, by the plan that is in it
    <generation>/done-*.json     what settling has carried out so far: message id → action
    <generation>/settled.json    settling is done: the report, and what a producer keeps beside it
    ended/<day>/<generation>.json    generations of which the report alone is left

A producer may keep files of its own in the same folder.  Losing these files must lose no message:
what is not known to be settled comes back from the broker.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.kit.state_files import Damaged, StateFiles, digest

_SETTLED, _BEGUN = "settled.json", "begun.json"


class Settled(NamedTuple):
    """How a settlement ended.

    :param details: What the producer keeps beside the report: JSON.
    """

    report: SettleReport
    details: Mapping[str, Any]


class GenerationLog:
    """The log of one generation.

    :param folder: Instead of the generation, the name of its folder.
    :raises StagingError: From every method, if files cannot be read or written.
    """

    def __init__(self, files: StateFiles, generation: str = "", *, folder: str = "") -> None:
        self._files = files
        #: The name of its folder.
        self.folder = folder or digest(generation)

    # -- on the way ----------------------------------------------------------------------------

    def note_now(self, actions: Mapping[str, Action]) -> None:
        """Records what callbacks settled immediately: message id → action."""
        self._append("now", actions)

    def now(self, names: Iterable[str] | None = None) -> dict[str, Action]:
        """Returns what callbacks settled immediately: message id → action.

        :param names: As :meth:`names` gave them just now.
        """
        return self._actions("now", names)

    def begin(self, plan: Any = None) -> Any:
        """Records that settling begins; of several settlers, and after a kill, one plan stands.

        :param plan: JSON.
        :returns: The plan that stands: this one, or that of whoever began first.
        """
        if self._files.create(self.path(_BEGUN), {"plan": plan}):
            return plan
        return self.read(_BEGUN)["plan"]

    def has_begun(self) -> bool:
        """Whether settling has begun, by anybody, and has not ended; reads no file."""
        return self._files.exists(self.path(_BEGUN))

    def note_done(self, actions: Mapping[str, Action]) -> None:
        """Records what settling has carried out since the last record: message id → action."""
        self._append("done", actions)

    def done(self, names: Iterable[str] | None = None) -> dict[str, Action]:
        """Returns what an unfinished settlement has carried out: message id → action."""
        return self._actions("done", names)

    # -- the end -------------------------------------------------------------------------------

    def end(self, report: SettleReport, *, replace: bool = False, **details: Any) -> Settled:
        """Records that settling is done.

        :param replace: Whether this report stands, and not the first one that was noted.
        :param details: What to keep beside the report: JSON.
        :returns: What stands.
        """
        path, value = self.path(_SETTLED), {"report": report.to_json(), **details}
        if replace:
            self._files.write(path, value)
        elif not self._files.create(path, value):
            return _settled(self.read(_SETTLED))
        return Settled(report, details)

    def settled(self) -> Settled | None:
        """Returns how it was settled; ``None`` if it was not."""
        value = self._files.read(self.path(_SETTLED))
        return None if value is None else _settled(value)

    def is_settled(self) -> bool:
        """Whether it was settled, by anybody; reads no file."""
        return self._files.exists(self.path(_SETTLED))

    def forget_soon(self, day: str) -> None:
        """Lets :func:`forget_ended` remove its files later.

        :param day: Today, as ``YYYY-MM-DD``.
        """
        self._files.write(f"ended/{day}/{self.folder}.json", {})

    def keep_report(self, day: str) -> None:
        """Removes all but the report, which :func:`forget_ended` may remove later.

        :param day: Today, as ``YYYY-MM-DD``.
        """
        self.forget_soon(day)
        self._files.discard(self.path(name) for name in self.names() if name != _SETTLED)

    # -- its files -----------------------------------------------------------------------------

    def path(self, name: str) -> str:
        """Returns the name of one of its files among the producer's."""
        return f"{self.folder}/{name}"

    def names(self) -> list[str]:
        """Lists the names of its files, sorted."""
        return self._files.names(self.folder)

    def read(self, name: str) -> Any:
        """Reads the JSON value of one of its files.

        :raises StagingError: If it is gone: another process has settled the generation meanwhile.
        """
        value = self._files.read(self.path(name))
        if value is None:
            raise self._gone(name)
        return value

    def write(self, name: str, value: Any) -> None:
        """Writes a file of the producer's own, replacing any."""
        self._files.write(self.path(name), value)

    def append(self, kind: str, value: Any) -> str:
        """Writes a file of the producer's own next to all others of that kind: ``<kind>-*.json``.

        :returns: Its name.
        """
        name = f"{kind}-{uuid.uuid4().hex}.json"
        self.write(name, value)
        return name

    def _append(self, kind: str, actions: Mapping[str, Action]) -> None:
        if actions:
            self.append(kind, dict(actions))  # an action is its text

    def _actions(self, kind: str, names: Iterable[str] | None) -> dict[str, Action]:
        listed = self.names() if names is None else names
        paths = [self.path(name) for name in listed if name.startswith(f"{kind}-")]
        values = dict(self._files.read_all(paths))
        actions: dict[str, Action] = {}
        for path in paths:
            value = values.get(path)
            if value is None:
                raise self._gone(path.rpartition("/")[2])
            if isinstance(value, Damaged):
                raise value
            actions.update({key: Action(action) for key, action in value.items()})
        return actions

    def _gone(self, name: str) -> StagingError:
        return StagingError(
            f"{name} of the generation in {self.folder} is gone: another process has settled it"
        )


def forget_ended(files: StateFiles, before: str) -> None:
    """Removes the reports of generations that ended before a day.

    :param before: ``YYYY-MM-DD``.
    """
    for day in files.names("ended"):
        if day < before:
            for name in files.names(f"ended/{day}"):
                files.remove(name.removesuffix(".json"))
            files.remove(f"ended/{day}")


def _settled(value: Mapping[str, Any]) -> Settled:
    details = {name: detail for name, detail in value.items() if name != "report"}
    return Settled(SettleReport.from_json(value["report"]), details)
