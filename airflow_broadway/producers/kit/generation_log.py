"""Records the settlement of one generation, so that an interrupted one can be resumed.

Each generation has a folder among a producer's :class:`StateFiles`; its name is a hash::

    <generation>/now-*.json      messages that callbacks settled immediately: message id → action
    <generation>/begun.json      the settlement has begun, with this plan
    <generation>/done-*.json     the settlement's progress: message id → action
    <generation>/settled.json    the settlement is done: the report, and details of the producer
    ended/<day>/<generation>.json    generations of which only the report is left

A producer may store other files in the same folder.  Losing these files must not lose messages: a
message without a record of its settlement is redelivered by the broker.
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
    """The result of a settlement.

    :param details: Further JSON values of the producer.
    """

    report: SettleReport
    details: Mapping[str, Any]


class GenerationLog:
    """The log of one generation.

    :param folder: The name of its folder, instead of the generation.
    :raises StagingError: From every method, if files cannot be read or written.
    """

    def __init__(self, files: StateFiles, generation: str = "", *, folder: str = "") -> None:
        self._files = files
        #: The name of its folder.
        self.folder = folder or digest(generation)

    # -- progress ------------------------------------------------------------------------------

    def note_now(self, actions: Mapping[str, Action]) -> None:
        """Records messages that callbacks settled immediately: message id → action."""
        self._append("now", actions)

    def now(self, names: Iterable[str] | None = None) -> dict[str, Action]:
        """Returns the messages that callbacks settled immediately: message id → action.

        :param names: The current result of :meth:`names`, if known.
        """
        return self._actions("now", names)

    def begin(self, plan: Any = None) -> Any:
        """Records the begin of a settlement; of several settlements the first plan is valid.

        :param plan: A JSON value.
        :returns: The valid plan: this one, or that of an earlier settlement.
        """
        if self._files.create(self.path(_BEGUN), {"plan": plan}):
            return plan
        return self.read(_BEGUN)["plan"]

    def has_begun(self) -> bool:
        """Returns whether a settlement is in progress, in any process; reads no file."""
        return self._files.exists(self.path(_BEGUN))

    def note_done(self, actions: Mapping[str, Action]) -> None:
        """Records the progress since the last record: message id → action."""
        self._append("done", actions)

    def done(self, names: Iterable[str] | None = None) -> dict[str, Action]:
        """Returns the progress of an unfinished settlement: message id → action."""
        return self._actions("done", names)

    # -- the end -------------------------------------------------------------------------------

    def end(self, report: SettleReport, *, replace: bool = False, **details: Any) -> Settled:
        """Records the end of the settlement.

        :param replace: Whether this report replaces an earlier one; otherwise the first is valid.
        :param details: Further JSON values to store.
        :returns: The valid result.
        """
        path, value = self.path(_SETTLED), {"report": report.to_json(), **details}
        if replace:
            self._files.write(path, value)
        elif not self._files.create(path, value):
            return _settled(self.read(_SETTLED))
        return Settled(report, details)

    def settled(self) -> Settled | None:
        """Returns the result of the settlement; ``None`` if it is not done."""
        value = self._files.read(self.path(_SETTLED))
        return None if value is None else _settled(value)

    def is_settled(self) -> bool:
        """Returns whether any process has settled the generation; reads no file."""
        return self._files.exists(self.path(_SETTLED))

    def forget_soon(self, day: str) -> None:
        """Marks the generation's files for removal by :func:`forget_ended`.

        :param day: Today, as ``YYYY-MM-DD``.
        """
        self._files.write(f"ended/{day}/{self.folder}.json", {})

    def keep_report(self, day: str) -> None:
        """Removes all files but the report, which :func:`forget_ended` removes later.

        :param day: Today, as ``YYYY-MM-DD``.
        """
        self.forget_soon(day)
        self._files.discard(self.path(name) for name in self.names() if name != _SETTLED)

    # -- files ---------------------------------------------------------------------------------

    def path(self, name: str) -> str:
        """Returns the path of one of its files among the producer's files."""
        return f"{self.folder}/{name}"

    def names(self) -> list[str]:
        """Lists the names of its files, sorted."""
        return self._files.names(self.folder)

    def read(self, name: str) -> Any:
        """Reads the JSON value of one of its files.

        :raises StagingError: If it was removed: another process has settled the generation.
        """
        value = self._files.read(self.path(name))
        if value is None:
            raise self._missing(name)
        return value

    def write(self, name: str, value: Any) -> None:
        """Writes a file of the producer, replacing any."""
        self._files.write(self.path(name), value)

    def append(self, kind: str, value: Any) -> str:
        """Writes one more file of a kind: ``<kind>-*.json``.

        :returns: Its name.
        """
        name = f"{kind}-{uuid.uuid4().hex}.json"
        self.write(name, value)
        return name

    def _append(self, kind: str, actions: Mapping[str, Action]) -> None:
        if actions:
            self.append(kind, dict(actions))  # an action is a str

    def _actions(self, kind: str, names: Iterable[str] | None) -> dict[str, Action]:
        listed = self.names() if names is None else names
        paths = [self.path(name) for name in listed if name.startswith(f"{kind}-")]
        values = dict(self._files.read_all(paths))
        actions: dict[str, Action] = {}
        for path in paths:
            value = values.get(path)
            if value is None:
                raise self._missing(path.rpartition("/")[2])
            if isinstance(value, Damaged):
                raise value
            actions.update({key: Action(action) for key, action in value.items()})
        return actions

    def _missing(self, name: str) -> StagingError:
        return StagingError(
            f"{name} of the generation in {self.folder} was deleted: another process has settled it"
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
