"""Records the receipts of a generation, their deadlines, and their settlement.

A message can only be settled by its receipt, and another process than the receiving one extends or
settles it.  So the source records receipts, in portions, before any callback gets a message: this
*secures* the messages of such a broker.  The files are in the folder that all pipelines of the
staging root share, so that pipelines with another name also recognize redelivered messages::

    <broker>/<queue>/<generation>/    its GenerationLog, and in the same folder
        receipts-000000.json          a portion: timestamps; id, receipt and group of each message
        renewed.json                  the deadline of the last extension, and its portions
        lost-*.json                   receipts that the broker refused, by id
        plan.json                     the messages that the settlement releases
        again-*.json                  the due timestamps of messages that callbacks released, by id

Losing these files loses no message: the broker redelivers all of them after their deadlines.
Without a staging folder receipts are kept in the memory of this process only.

Timestamps are seconds since the epoch, by the producer's clock and never by the broker's: a broker
accepts an expired receipt as long as no other consumer has the message.
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
#: The file name prefix of portions.
_PORTION: Final = "receipts-"
#: Days for which the report of a settled generation is kept.
KEPT_REPORTS: Final = 7
#: Ended generations that a process caches, so that settling again returns the same report.
_KEPT_GENERATIONS: Final = 256
#: Seconds between two reads of recorded failures if the broker counts deliveries; otherwise every
#: receive reads them.
_LOOK_INTERVAL: Final = 30.0
#: Seconds between two listings of other generations: less than the shortest lease.
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
        #: Message id → its message group or ordering key, if any.
        self.groups: dict[str, str] = {}
        #: The timestamp of the first receive.
        self.since: float | None = None
        #: (deadline, ids) of each portion.
        self._spans: list[tuple[float, list[str]]] = []
        #: Message id → the action that callbacks carried out immediately.
        self.now: dict[str, Action] = {}
        #: Message id → the action that an unfinished settlement carried out.
        self.done: dict[str, Action] = {}
        #: Message ids with receipts that the broker refused; one id may have several.
        self._refused: set[tuple[str, str]] = set()
        #: Group with a redelivered message → the timestamp from which that is due.
        self.blocked: dict[str, float] = {}
        #: Message of such a group that a callback released → the timestamp from which it is due.
        self.again: dict[str, float] = {}
        #: Whether a settlement has begun, and whether it had begun before this one.
        self.begun = self.resumed = False
        #: Message id → the action of its first request without a response.
        self.unanswered: dict[str, Action] = {}
        #: The report of the settlement; ``None`` while it is not settled.
        self.report: SettleReport | None = None

    # -- holding -------------------------------------------------------------------------------

    @property
    def until(self) -> float | None:
        """The earliest deadline of all portions; ``None`` if nothing was received."""
        with self._lock:
            return min((until for until, _ in self._spans), default=None)

    def held(self) -> list[str]:
        """Returns the ids that are neither settled nor lost, in order of arrival."""
        with self._lock:
            ended = self.now.keys() | self.lost
            return [key for key in self.handles if key not in ended]

    @property
    def lost(self) -> set[str]:
        """The ids whose newest receipt was refused; other consumers receive these messages."""
        handles = self.handles
        return {key for key, receipt in self._refused if handles.get(key) == receipt}

    def hold(
        self, handles: Mapping[str, str], groups: Mapping[str, str], since: float, until: float
    ) -> None:
        """Records receipts durably, and holds their messages from then on.

        :param handles: Message id → receipt, which replaces an older one.
        :raises StagingError: If they cannot be written; the messages are then not held.
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
        """Returns the ids with a deadline not after ``horizon``."""
        with self._lock:
            ended = self.now.keys() | self.lost
            ids = chain.from_iterable(ids for until, ids in self._spans if until <= horizon)
            return [key for key in dict.fromkeys(ids) if key not in ended]

    def renewed(self, horizon: float, until: float) -> None:
        """Records that messages due at ``horizon`` are held until ``until``."""
        with self._lock:
            extended = [ids for held, ids in self._spans if held <= horizon]
            self._spans = [(held, ids) for held, ids in self._spans if held > horizon]
            self._spans.append((until, [*chain.from_iterable(extended)]))
            earliest = min(held for held, _ in self._spans)
            # Messages received meanwhile may have an earlier deadline.
            value = {"until": earliest, "portions": self._portions}
        self._log.write("renewed.json", value)

    def refresh(self) -> None:
        """Reads the deadline of extensions by other processes."""
        value = self._files.read(self._log.path("renewed.json"))
        if value is not None:
            with self._lock:
                minimum = _min_deadline(value, self._portions - 1)
                self._spans = [(max(until, minimum), ids) for until, ids in self._spans]

    def lose(self, ids: Iterable[str]) -> None:
        """Records ids whose receipt the broker refused, so that it is not used again."""
        with self._lock:
            lost = {key: self.handles[key] for key in ids if key in self.handles}
            self._refused.update(lost.items())
        if lost:
            self._log.append("lost", lost)

    # -- settling ------------------------------------------------------------------------------

    def note_now(self, actions: Mapping[str, Action]) -> None:
        """Records the actions that callbacks carried out immediately.

        The timestamps until which released messages block their groups are recorded before.
        """
        with self._lock:
            self.now.update(actions)
        again = {key: self.again[key] for key in actions if key in self.again}
        if again:
            self._log.append("again", again)
        self._log.note_now(actions)

    def settled_now(self, now: float) -> dict[str, Verdict]:
        """Returns the verdicts that callbacks carried out immediately, with remaining delays."""
        return {
            key: Verdict(action, max(0.0, self.again.get(key, now) - now))
            for key, action in self.now.items()
        }

    def begin(self) -> None:
        """Records the begin of a settlement, and reads the portions written until then.

        The source checks for this record after each portion that it writes, so messages of a later
        portion reach no callback.
        """
        self.resumed = self.begun
        if not self.begun:
            self._log.begin()
        self.begun = True
        written = [name for name in self._log.names() if name.startswith(_PORTION)]
        for name in written[self._portions :]:
            self._read_portion(name, {})

    def plan(self, again: ComingAgain) -> ComingAgain:
        """Records the messages that the settlement releases, before it does.

        :returns: The valid plan: this one, or that of an earlier settlement.
        """
        value = [again.all_but, sorted(again.ids)]
        if not self._files.create(self._log.path("plan.json"), value):
            all_but, ids = self._log.read("plan.json")
            again = ComingAgain(frozenset(ids), all_but)
        return again

    def note_done(self, actions: Mapping[str, Action]) -> None:
        """Records the progress of the settlement."""
        self.done.update(actions)
        self._log.note_done(actions)

    def end(self, report: SettleReport, day: str) -> SettleReport:
        """Records the end of the settlement; the generation holds nothing from then on.

        :param day: Today, as ``YYYY-MM-DD``.
        :returns: The valid report: of two concurrent settlements, that of the first.
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
        """Removes all files but the report; repeated by the next call after a kill."""
        self._log.keep_report(day)

    def ended(self) -> bool:
        """Returns whether any process has settled the generation."""
        return self.report is not None or self._log.is_settled()

    def is_settled_elsewhere(self) -> bool:
        """Returns whether another process is settling the generation, or has settled it."""
        return self._log.has_begun() or self.ended()  # in this order: the end removes begun.json

    # -- reading -------------------------------------------------------------------------------

    def load(self) -> Receipts:
        """Reads the records of other processes; returns ``self``.

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
            self._load_portion(self._log.read(name), _min_deadline(renewed, number))
        except Damaged as error:  # only the messages of this portion are not settled
            log.error("%s: its messages are redelivered when the lease lapses", error)
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


def _min_deadline(renewed: Mapping[str, Any], portion: int) -> float:
    """Returns the minimum deadline of a portion by the record of the last extension."""
    covered: bool = portion < renewed.get("portions", portion + 1)
    return float(renewed["until"]) if renewed and covered else 0.0


#: The receipts of generations that this process receives for, or has recently settled.
_here: dict[tuple[str, str | None, str, str], Receipts] = {}
_here_lock = threading.Lock()
#: The records of queues without a staging folder, for brokers that do not count deliveries.
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
        """Whether other processes can read the receipts."""
        return self._files.durable

    def open(self, generation: str) -> Receipts:
        """Creates the receipts of a new generation, and caches them in this process."""
        forget_ended(self._files, day_of(self._clock.now(), before=KEPT_REPORTS))
        receipts = Receipts(self._files, generation)
        with _here_lock:
            while len(_here) >= _KEPT_GENERATIONS:
                old = next((key for key, other in _here.items() if other.report is not None), None)
                if old is None:
                    break
                del _here[old]
            _here[(*self._queue, generation)] = receipts
        return receipts

    def of(self, generation: str) -> Receipts:
        """Returns the current receipts of a generation."""
        return self._here(generation) or Receipts(self._files, generation).load()

    def open_ones(self, own: str) -> set[str]:
        """Returns the folders of all unsettled generations except ``own``.

        :raises StagingError: If they cannot be listed.
        """
        days = self._files.names("ended")
        for day in days:
            if day not in self._ended or day in days[-2:]:  # older days no longer change
                self._ended[day] = {
                    name.removesuffix(".json") for name in self._files.names(f"ended/{day}")
                }
        ended = set().union(*self._ended.values())
        return set(self._files.names()) - ended - {"attempts", "ended", digest(own)}

    def in_folder(self, folder: str) -> Receipts:
        """Returns the current receipts of another generation by its folder name."""
        return Receipts(self._files, folder=folder).load()

    def count_held(self, own: str) -> int:
        """Counts the messages that generations other than ``own`` currently hold."""
        now = self._clock.now().timestamp()
        folders = [self.in_folder(folder) for folder in self.open_ones(own)]
        return sum(len(receipts.held()) for receipts in folders if (receipts.until or 0.0) > now)

    def is_open(self, generation: str) -> bool:
        """Returns whether this process has cached the receipts of a generation."""
        return self._here(generation) is not None

    def ended(self, generation: str) -> bool:
        """Returns whether any process has settled a generation."""
        return (self._here(generation) or Receipts(self._files, generation)).ended()

    def close(self, generation: str) -> None:
        """Drops the cached receipts of a closed source, if they are also in files."""
        if self.durable:
            with _here_lock:
                _here.pop((*self._queue, generation), None)

    def _here(self, generation: str) -> Receipts | None:
        with _here_lock:
            return _here.get((*self._queue, generation))


class Earlier:
    """Identifies redelivered messages for brokers that do not count deliveries.

    A message is redelivered for one of two reasons, and staging has a record of both: it was
    released, or the lease of its generation lapsed and the receipts still exist.  This class covers
    lapsed generations.  It is for one thread.

    :param own: The generation of the caller.
    """

    def __init__(self, folder: ReceiptsFolder, own: str) -> None:
        self._folder = folder
        self._own = own
        self._look_at = 0.0
        #: Other open generation → the last known deadline of its messages.
        self._until: dict[str, float] = {}
        #: Generations that need not be read again.
        self._known: set[str] = set()
        self._ids: set[str] = set()

    def among(self, ids: Iterable[str], now: datetime) -> set[str]:
        """Returns those of ``ids`` that a lapsed generation held.

        :raises StagingError: If the records cannot be read.
        """
        seconds = now.timestamp()
        if seconds >= self._look_at:
            self._look_at = seconds + _EARLIER_INTERVAL
            folders = self._folder.open_ones(self._own) - self._known
            self._until = {folder: self._until.get(folder, 0.0) for folder in folders}
        for folder in [folder for folder, until in self._until.items() if until <= seconds]:
            self._read_lapsed(folder, seconds)
        return self._ids.intersection(ids) if self._ids else set()

    def _read_lapsed(self, folder: str, now: float) -> None:
        try:
            receipts = self._folder.in_folder(folder)
        except StagingError as error:  # settled meanwhile, or written by another release
            log.info("%s", error)
            return
        if receipts.report is None:
            # Without receipts yet, nothing of it lapses before the next listing.
            self._until[folder] = receipts.until or now + _EARLIER_INTERVAL
            if self._until[folder] > now:
                return
            self._ids.update(receipts.handles)
        # It has lapsed, or was settled and its releases are recorded.
        self._known.add(folder)
        del self._until[folder]
