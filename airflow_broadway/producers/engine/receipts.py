"""Records the receipts that one generation holds, until when, and how they were settled.

A receipt is all that settles a message, and the process that extends or settles it is another than
the one that received it.  So the source records receipts, in portions, before any callback sees a
message: that is how such a broker *secures*.  The files are below the folder that all pipelines of
the staging root share, so that a pipeline of another name knows which messages were delivered
before::

    <broker>/<queue>/<generation>/    its GenerationLog, and in the same folder
        receipts-000000.json          a portion: timestamps; id, receipt and group of each message
        renewed.json                  so many portions are held until then
        lost-*.json                   receipts that the broker refused, by id
        plan.json                     which messages settling releases
        again-*.json                  from when on messages that callbacks released may come, by id

Losing these files loses no message: the broker redelivers all when their time is over.  Without a
staging folder receipts live in the memory of this process alone.

Timestamps are seconds since the epoch, by the producer's clock and never by the broker's, which
accepts an expired receipt as long as nobody else has the message.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import chain
from typing import Any, Final

from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.engine.port import Broker
from airflow_broadway.producers.kit.failures import Failures
from airflow_broadway.producers.kit.generation_log import GenerationLog, forget_ended
from airflow_broadway.producers.kit.state_files import (
    Damaged,
    MemoryFiles,
    StateFiles,
    day_of,
    digest,
    state_files,
)

log = logging.getLogger(__name__)

_VERSION: Final = 1
#: The beginning of the names of files that have a portion each.
_PORTION: Final = "receipts-"
#: Days for which the report of a settled generation is kept.
KEPT_REPORTS: Final = 7
#: Generations that a process keeps after their end, so that settling again reports the same.
_KEPT_GENERATIONS: Final = 256
#: Seconds between two looks for failures that others recorded, where the broker counts deliveries;
#: where it does not, each receive looks.
_LOOK_INTERVAL: Final = 30.0
#: Seconds between two looks for generations of others: less than the shortest lease.
_EARLIER_INTERVAL: Final = 5.0


class Receipts:
    """One generation's receipts; shared by the threads of a process.

    :param folder: The name of the generation's folder, instead of the generation.
    """

    def __init__(self, files: StateFiles, generation: str = "", *, folder: str = "") -> None:
        self._files = files
        self._log = GenerationLog(files, generation, folder=folder)
        self._lock = threading.Lock()
        self._portions = 0
        #: Message id → its newest receipt, in order of arrival.
        self.handles: dict[str, str] = {}
        #: Message id → the group in which it keeps its order, if any.
        self.groups: dict[str, str] = {}
        #: When the first message was requested.
        self.since: float | None = None
        #: [held until, ids], a portion each.
        self._spans: list[tuple[float, list[str]]] = []
        #: Message id → how callbacks settled it immediately.
        self.now: dict[str, Action] = {}
        #: Message id → how an unfinished settlement settled it.
        self.done: dict[str, Action] = {}
        #: Message ids with the receipts that the broker refused: of one id there may be several.
        self._refused: set[tuple[str, str]] = set()
        #: Groups of which a message comes again → from when on it may.
        self.blocked: dict[str, float] = {}
        #: Messages of these groups that callbacks released → from when on each may come.
        self.again: dict[str, float] = {}
        #: Whether settling has begun; and whether it had before this settlement.
        self.begun = self.resumed = False
        #: Message id → the first request about it whose answer never came.
        self.unanswered: dict[str, Action] = {}
        #: The report of its settlement; ``None`` while it is not settled.
        self.report: SettleReport | None = None

    # -- holding -------------------------------------------------------------------------------

    @property
    def until(self) -> float | None:
        """Until when all of it is held; ``None`` if nothing was received."""
        with self._lock:
            return min((until for until, _ in self._spans), default=None)

    def held(self) -> list[str]:
        """Returns the ids that are neither settled nor lost, in order of arrival."""
        with self._lock:
            gone = self.now.keys() | self.lost
            return [key for key in self.handles if key not in gone]

    @property
    def lost(self) -> set[str]:
        """The ids whose newest receipt the broker refused: another consumer has them, or will."""
        handles = self.handles
        return {key for key, receipt in self._refused if handles.get(key) == receipt}

    def hold(
        self, handles: Mapping[str, str], groups: Mapping[str, str], since: float, until: float
    ) -> None:
        """Records receipts where other processes read them, and holds their messages from then on.

        :param handles: Message id → receipt, which replaces an older one.
        :raises StagingError: If they cannot be written: then they are not held.
        """
        if self._files.durable:
            held = [
                [key, handle, groups[key]] if key in groups else [key, handle]
                for key, handle in handles.items()
            ]
            value = {"version": _VERSION, "since": since, "until": until, "held": held}
            self._log.write(f"{_PORTION}{self._portions:06d}.json", value)
        self._add(handles, groups, since, until)

    def _add(
        self, handles: Mapping[str, str], groups: Mapping[str, str], since: float, until: float
    ) -> None:
        with self._lock:
            self.handles.update(handles)
            self.groups.update(groups)
            self.since = since if self.since is None else min(self.since, since)
            self._spans.append((until, list(handles)))
            self._portions += 1

    # -- extending -----------------------------------------------------------------------------

    def due(self, horizon: float) -> list[str]:
        """Returns the ids that are held until ``horizon`` at most."""
        with self._lock:
            gone = self.now.keys() | self.lost
            ids = chain.from_iterable(ids for until, ids in self._spans if until <= horizon)
            return [key for key in dict.fromkeys(ids) if key not in gone]

    def renewed(self, horizon: float, until: float) -> None:
        """Records that what was due at ``horizon`` is held until ``until``."""
        with self._lock:
            extended = [ids for held, ids in self._spans if held <= horizon]
            self._spans = [(held, ids) for held, ids in self._spans if held > horizon]
            self._spans.append((until, [*chain.from_iterable(extended)]))
            everything = min(held for held, _ in self._spans)
            # What is received meanwhile may have waited, and be held for less than that.
            value = {"until": everything, "portions": self._portions}
        self._log.write("renewed.json", value)

    def refresh(self) -> None:
        """Reads until when others have extended it since."""
        value = self._files.read(self._log.path("renewed.json"))
        if value is not None:
            with self._lock:
                least = _least(value, self._portions - 1)
                self._spans = [(max(until, least), ids) for until, ids in self._spans]

    def lose(self, ids: Iterable[str]) -> None:
        """Records ids whose receipt the broker refuses: it is not used again."""
        with self._lock:
            lost = {key: self.handles[key] for key in ids if key in self.handles}
            self._refused.update(lost.items())
        if lost:
            self._log.append("lost", lost)

    # -- settling ------------------------------------------------------------------------------

    def note_now(self, actions: Mapping[str, Action]) -> None:
        """Records how callbacks settled messages immediately, and before that how long each holds
        back those behind it.
        """
        with self._lock:
            self.now.update(actions)
        again = {key: self.again[key] for key in actions if key in self.again}
        if again:
            self._log.append("again", again)
        self._log.note_now(actions)

    def settled_now(self, now: float) -> dict[str, Verdict]:
        """Returns how callbacks settled messages immediately, with the rest of their delays."""
        return {
            key: Verdict(action, max(0.0, self.again.get(key, now) - now))
            for key, action in self.now.items()
        }

    def begin(self) -> None:
        """Records that settling begins, and reads the portions written until then.

        The source checks for that record after each portion that it writes: a portion that is not
        there now reaches no callback.
        """
        self.resumed = self.begun
        if not self.begun:
            self._log.begin()
        self.begun = True
        written = [name for name in self._log.names() if name.startswith(_PORTION)]
        for name in written[self._portions :]:
            self._read_portion(name, {})

    def plan(self, again: ComingAgain) -> ComingAgain:
        """Records which messages settling releases, before it does.

        :returns: The plan that stands: this, or that of an earlier settlement.
        """
        value = [again.all_but, sorted(again.ids)]
        if not self._files.create(self._log.path("plan.json"), value):
            all_but, ids = self._log.read("plan.json")
            again = ComingAgain(frozenset(ids), all_but)
        return again

    def note_done(self, actions: Mapping[str, Action]) -> None:
        """Records how far settling has come."""
        self.done.update(actions)
        self._log.note_done(actions)

    def end(self, report: SettleReport, day: str) -> SettleReport:
        """Records that settling is done; nothing is held from now on.

        :param day: Today, as ``YYYY-MM-DD``.
        :returns: The report that stands: of two settlements at a time, the first one's.
        """
        stands = self._log.end(report).report
        self.keep_report(day)
        with self._lock:
            self.report = stands
            self.handles.clear()
            self.groups.clear()
            self._spans.clear()
            self.done.clear()
        return stands

    def keep_report(self, day: str) -> None:
        """Removes all but the report; settling again does so too, after a kill of the first."""
        self._log.keep_report(day)

    def ended(self) -> bool:
        """Whether it has been settled, by any process."""
        return self.report is not None or self._log.is_settled()

    def is_settled_elsewhere(self) -> bool:
        """Whether another process settles it, or has; for its source, which does not settle."""
        return self._log.has_begun() or self.ended()  # in this order: the end removes the beginning

    # -- reading -------------------------------------------------------------------------------

    def load(self) -> Receipts:
        """Reads the records of other processes; returns these receipts.

        :raises StagingError: If they cannot be read.
        """
        names = self._log.names()
        settled = self._log.settled() if "settled.json" in names else None
        if settled is not None:
            self.report = settled.report
            return self
        self.begun = self.resumed = "begun.json" in names
        self.done, self.now = self._log.done(names), self._log.now(names)
        renewed = self._log.read("renewed.json") if "renewed.json" in names else {}
        for name in names:
            if name.startswith(_PORTION):
                self._read_portion(name, renewed)
            elif name.startswith("lost-"):
                self._refused.update(self._log.read(name).items())
            elif name.startswith("again-"):
                self.again.update(self._log.read(name))
        return self

    def _read_portion(self, name: str, renewed: Mapping[str, Any]) -> None:
        number = self._portions
        try:
            self._load_portion(self._log.read(name), _least(renewed, number))
        except Damaged as error:  # its messages alone are not settled
            log.error("%s: its messages come back by themselves", error)
        self._portions = number + 1

    def _load_portion(self, value: Any, least: float) -> None:
        folder = self._log.folder
        if not isinstance(value, dict) or "version" not in value:
            raise Damaged(f"receipts of {folder} are damaged")
        if value["version"] != _VERSION:
            raise StagingError(
                f"the receipts of {folder} have format version {value['version']!r}; this release"
                f" reads {_VERSION}: use the release that wrote them"
            )
        try:
            handles = {entry[0]: entry[1] for entry in value["held"]}
            groups = {entry[0]: entry[2] for entry in value["held"] if len(entry) > 2}
            since, until = float(value["since"]), float(value["until"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise Damaged(f"receipts of {folder} are damaged") from None
        self._add(handles, groups, since, max(until, least))


def _least(renewed: Mapping[str, Any], portion: int) -> float:
    """Returns until when a portion is held at least, by the record of the last extension."""
    covered: bool = portion < renewed.get("portions", portion + 1)
    return float(renewed["until"]) if renewed and covered else 0.0


#: The receipts of generations for which this process receives, and of some that it has settled.
_here: dict[tuple[str, str | None, str, str], Receipts] = {}
_here_lock = threading.Lock()
#: Without a staging folder, for brokers that count no deliveries: the records of each queue.
_memory: dict[tuple[str, str], MemoryFiles] = {}


class ReceiptsFolder:
    """The receipts of one queue's generations."""

    def __init__(self, broker: Broker[Any]) -> None:
        kind = broker.kind
        self._queue = (kind, broker.env.shared, broker.place)
        self._clock = broker.clock
        files = broker.state_files()
        if files is None and broker.env.shared is None and not broker.native_attempts:
            files = _memory.setdefault((kind, broker.place), MemoryFiles())
        self._files = files or state_files(broker.env.shared, f"{kind}/{digest(broker.place)}")
        interval = _LOOK_INTERVAL if broker.native_attempts else 0.0
        self.failures = Failures(self._files, broker.kept_days, look_interval=interval)
        #: Day → the folders of the generations that ended then.
        self._ended: dict[str, set[str]] = {}

    @property
    def durable(self) -> bool:
        """Whether other processes see them."""
        return self._files.durable

    def open(self, generation: str) -> Receipts:
        """Opens those of a new generation, for its source; this process finds them from now on."""
        forget_ended(self._files, day_of(self._clock.now(), before=KEPT_REPORTS))
        receipts = Receipts(self._files, generation)
        with _here_lock:
            while len(_here) >= _KEPT_GENERATIONS:
                old = next((key for key, kept in _here.items() if kept.report is not None), None)
                if old is None:
                    break
                del _here[old]
            _here[(*self._queue, generation)] = receipts
        return receipts

    def of(self, generation: str) -> Receipts:
        """Returns those of a generation, as they are now."""
        return self._here(generation) or Receipts(self._files, generation).load()

    def open_ones(self, own: str) -> set[str]:
        """Returns the folders of all unsettled generations but one's own.

        :raises StagingError: If they cannot be listed.
        """
        days = self._files.names("ended")
        for day in days:
            if day not in self._ended or day in days[-2:]:  # older days change no more
                self._ended[day] = {
                    name.removesuffix(".json") for name in self._files.names(f"ended/{day}")
                }
        ended = set().union(*self._ended.values())
        return set(self._files.names()) - ended - {"attempts", "ended", digest(own)}

    def in_folder(self, folder: str) -> Receipts:
        """Returns those of another generation, by the name of its folder, as they are now."""
        return Receipts(self._files, folder=folder).load()

    def count_held(self, own: str) -> int:
        """Counts the messages that generations other than ``own`` hold, as of now."""
        now = self._clock.now().timestamp()
        folders = [self.in_folder(folder) for folder in self.open_ones(own)]
        return sum(len(receipts.held()) for receipts in folders if (receipts.until or 0.0) > now)

    def is_open(self, generation: str) -> bool:
        """Whether this process receives for it, or keeps its receipts."""
        return self._here(generation) is not None

    def ended(self, generation: str) -> bool:
        """Whether a generation has been settled, by any process."""
        return (self._here(generation) or Receipts(self._files, generation)).ended()

    def close(self, generation: str) -> None:
        """Forgets the receipts of a source that has ended, if they can be read from files."""
        if self.durable:
            with _here_lock:
                _here.pop((*self._queue, generation), None)

    def _here(self, generation: str) -> Receipts | None:
        with _here_lock:
            return _here.get((*self._queue, generation))


class Earlier:
    """Knows which messages were delivered before, where the broker does not count deliveries.

    A message comes again for one of two reasons, and both are known from staging: it was released,
    which was recorded before; or the lease of a generation lapsed, whose receipts are still there.
    These are the messages of such generations; used from one thread.

    :param own: The generation of the caller.
    """

    def __init__(self, folder: ReceiptsFolder, own: str) -> None:
        self._folder = folder
        self._own = own
        self._look_at = 0.0
        #: Open generations of others → until when their messages are held, as far as is known.
        self._until: dict[str, float] = {}
        #: Generations of which nothing more is to be learnt.
        self._known: set[str] = set()
        self._ids: set[str] = set()

    def among(self, ids: Iterable[str], now: datetime) -> set[str]:
        """Returns those of ``ids`` that such a generation held.

        :raises StagingError: If that cannot be read.
        """
        seconds = now.timestamp()
        if seconds >= self._look_at:
            self._look_at = seconds + _EARLIER_INTERVAL
            open_ones = self._folder.open_ones(self._own) - self._known
            self._until = {folder: self._until.get(folder, 0.0) for folder in open_ones}
        for folder in [folder for folder, until in self._until.items() if until <= seconds]:
            self._learn(folder, seconds)
        return self._ids.intersection(ids) if self._ids else set()

    def _learn(self, folder: str, now: float) -> None:
        try:
            receipts = self._folder.in_folder(folder)
        except StagingError as error:  # settled meanwhile, or of another release
            log.info("%s", error)
            return
        if receipts.report is None:
            # One that has received nothing yet has nothing that lapses before the next look.
            self._until[folder] = receipts.until or now + _EARLIER_INTERVAL
            if self._until[folder] > now:
                return
            self._ids.update(receipts.handles)
        # Lapsed; or settled, which recorded what came again.
        self._known.add(folder)
        del self._until[folder]
