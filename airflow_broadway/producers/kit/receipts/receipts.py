"""The receipts that one generation holds: which, until when, and what became of them.

A receipt is all that settles a message of SQS or Pub/Sub, and whoever renews or settles it is
another process than the one that received it.  So the source writes the receipts down, in portions,
before any callback sees a message: that is how such a broker *secures*.  Below the folder that all
pipelines of the staging root share, so that a pipeline of another name knows what was handed out::

    <broker>/<queue>/<generation>/    its GenerationLog, and in the same folder
        receipts-000000.json          a portion: instants; id, receipt and group of each message
        renewed.json                  so many portions are held until then
        lost-*.json                   receipts that the broker refused, by id
        plan.json                     which messages settling gives back
        again-*.json                  from when on what callbacks gave back may come, by id

Losing these files loses no message: all come back when their time is over.  Without a staging
folder the receipts are in this process's memory alone.

Instants are seconds since the epoch, by the producer's clock and never by the broker's: it takes a
receipt whose time is over as long as nobody else has the message, and so cannot be asked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Final

from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.kit.failures import Failures
from airflow_broadway.producers.kit.generation_log import GenerationLog, forget_ended
from airflow_broadway.producers.kit.state_files import Damaged, StateFiles, digest, state_files

__all__ = ["KEPT_REPORTS", "Receipts", "ReceiptsFolder"]

log = logging.getLogger(__name__)

_VERSION: Final = 1
#: What the files begin with that each have a portion of them.
_PORTION: Final = "receipts-"
#: Days for which the report of a settled generation is kept.
KEPT_REPORTS: Final = 7
#: Generations that a process keeps after their end, so that settling again reports the same.
_KEPT_GENERATIONS: Final = 256


class Receipts:
    """One generation's receipts; shared by the threads of a process.

    :param folder: Instead of the generation, the name of its folder.
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
        #: When the first message was asked for.
        self.since: float | None = None
        #: [held until, ids], a portion each.
        self._spans: list[tuple[float, list[str]]] = []
        #: What callbacks settled at once.
        self.now: dict[str, Action] = {}
        #: What an unfinished settlement has carried out.
        self.done: dict[str, Action] = {}
        #: Message ids with the receipts that the broker refused: of one id there may be several.
        self._refused: set[tuple[str, str]] = set()
        #: Groups of which something comes again → from when on it may.
        self.blocked: dict[str, float] = {}
        #: Of these, messages that callbacks gave back → from when on each may come.
        self.again: dict[str, float] = {}
        #: Whether settling is noted to have begun; and whether it was before this settlement.
        self.begun = self.resumed = False
        #: What was asked of the broker first whose answer never came.
        self.unanswered: dict[str, Action] = {}
        #: How it was settled; ``None`` while it is not.
        self.report: SettleReport | None = None

    # -- what is held --------------------------------------------------------------------------

    @property
    def until(self) -> float | None:
        """Until when all of it is held; ``None`` if nothing was received."""
        with self._lock:
            return min((until for until, _ in self._spans), default=None)

    def held(self) -> list[str]:
        """The ids that are neither settled nor lost, in order of arrival."""
        with self._lock:
            gone = self.now.keys() | self.lost
            return [each for each in self.handles if each not in gone]

    @property
    def lost(self) -> set[str]:
        """The ids whose receipt the broker refused: somebody else has them, or will.

        One that this generation receives again has another receipt, and is lost no more.
        """
        handles = self.handles
        return {key for key, receipt in self._refused if handles.get(key) == receipt}

    def knows(self, message_id: str) -> bool:
        """Whether this generation has received it before."""
        return message_id in self.handles

    # -- receiving -----------------------------------------------------------------------------

    def add(
        self, handles: Mapping[str, str], groups: Mapping[str, str], since: float, until: float
    ) -> None:
        """Take receipts, in memory.

        :param handles: Message id → receipt; of one that is there already, the newer.
        """
        with self._lock:
            self.handles.update(handles)
            self.groups.update(groups)
            self.since = since if self.since is None else min(self.since, since)
            self._spans.append((until, list(handles)))
            self._portions += 1

    def write(
        self, handles: Mapping[str, str], groups: Mapping[str, str], since: float, until: float
    ) -> None:
        """Write receipts down where other processes find them.

        :raises StagingError: If they cannot be written.
        """
        if not self._files.durable:  # nobody else could read them
            return
        name = f"{_PORTION}{self._portions:06d}.json"
        held = [
            [each, handle, groups[each]] if each in groups else [each, handle]
            for each, handle in handles.items()
        ]
        self._log.write(name, {"version": _VERSION, "since": since, "until": until, "held": held})

    # -- renewing ------------------------------------------------------------------------------

    def due(self, instant: float) -> list[str]:
        """The ids that are held until ``instant`` at most."""
        with self._lock:
            gone = self.now.keys() | self.lost
            found = (ids for until, ids in self._spans if until <= instant)
            return [each for each in dict.fromkeys(chain.from_iterable(found)) if each not in gone]

    def renewed(self, instant: float, until: float) -> None:
        """Note that what was due at ``instant`` is held until ``until``."""
        with self._lock:
            spans, self._spans = self._spans, []
            renewed: list[str] = []
            for held_until, ids in spans:
                if held_until <= instant:
                    renewed += ids
                else:
                    self._spans.append((held_until, ids))
            self._spans.append((until, renewed))
            everything = min(held_until for held_until, _ in self._spans)
            # What is received meanwhile may have waited, and be held for less than that.
            value = {"until": everything, "portions": self._portions}
        self._log.write("renewed.json", value)

    def lose(self, ids: Iterable[str]) -> None:
        """Note ids whose receipt the broker refuses: they are not asked for again by it."""
        with self._lock:
            lost = {each: self.handles[each] for each in ids if each in self.handles}
            self._refused.update(lost.items())
        if lost:
            self._log.append("lost", lost)

    # -- settling ------------------------------------------------------------------------------

    def note_now(self, actions: Mapping[str, Action]) -> None:
        """Note what callbacks settled at once, and before that how long it holds others back."""
        with self._lock:
            self.now.update(actions)
        again = {key: self.again[key] for key in actions if key in self.again}
        if again:
            self._log.append("again", again)
        self._log.note_now(actions)

    def settled_now(self, now: float) -> dict[str, Verdict]:
        """What callbacks settled at once, with what is left of the delays."""
        return {
            key: Verdict(action, max(0.0, self.again.get(key, now) - now))
            for key, action in self.now.items()
        }

    def begin(self) -> None:
        """Note that settling begins, and read what was written until then.

        Its source looks for the note after each portion that it writes: one that is not there now
        reaches no callback.
        """
        self.resumed = self.begun
        if not self.begun:
            self._log.begin()
        self.begun = True
        written = [name for name in self._log.names() if name.startswith(_PORTION)]
        for name in written[self._portions :]:
            self._read_portion(name, {})

    def plan(self, again: ComingAgain) -> ComingAgain:
        """Note which messages settling gives back, before it does.

        :returns: What stands: this, or what was noted by whoever began before.
        """
        value = [again.all_but, sorted(again.ids)]
        if not self._files.create(self._log.path("plan.json"), value):
            all_but, ids = self._log.read("plan.json")
            again = ComingAgain(frozenset(ids), all_but)
        return again

    def note_done(self, actions: Mapping[str, Action]) -> None:
        """Note what settling has carried out so far."""
        self.done.update(actions)
        self._log.note_done(actions)

    def end(self, report: SettleReport, day: str) -> SettleReport:
        """Note that settling is done; nothing is held from now on.

        :param day: Today, as ``YYYY-MM-DD``.
        :returns: The report that stands: of two who settle at once, the first one's.
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
        """Remove all but the report; who settles again does so too, for the first may have been
        killed before.

        :param day: Today, as ``YYYY-MM-DD``.
        """
        self._log.keep_report(day)

    def ended(self) -> bool:
        """Whether it has been settled, by anybody."""
        return self.report is not None or self._log.is_settled()

    def is_settled_elsewhere(self) -> bool:
        """Whether somebody settles it, or has; for its source, which does not settle."""
        return self._log.has_begun() or self.ended()  # in this order: the end removes the beginning

    # -- reading -------------------------------------------------------------------------------

    def load(self) -> None:
        """Read what other processes wrote.

        :raises StagingError: If it cannot be read.
        """
        names = self._log.names()
        settled = self._log.settled() if "settled.json" in names else None
        if settled is not None:
            self.report = settled.report
            return
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

    def refresh(self) -> None:
        """Learn until when others have renewed it since."""
        value = self._files.read(self._log.path("renewed.json"))
        if value is not None:
            with self._lock:
                least = _least(value, self._portions - 1)
                self._spans = [(max(until, least), ids) for until, ids in self._spans]

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
            held = value["held"]
            handles = {each[0]: each[1] for each in held}
            groups = {each[0]: each[2] for each in held if len(each) > 2}
            since, until = float(value["since"]), float(value["until"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise Damaged(f"receipts of {folder} are damaged") from None
        self.add(handles, groups, since, max(until, least))


def _least(renewed: Mapping[str, Any], portion: int) -> float:
    """Until when a portion is held at least, by the note of the last renewal."""
    covered: bool = portion < renewed.get("portions", portion + 1)
    return float(renewed["until"]) if renewed and covered else 0.0


#: The receipts that this process receives, and some that it has settled.
_here: dict[tuple[str, str | None, str, str], Receipts] = {}
_here_lock = threading.Lock()


class ReceiptsFolder:
    """The receipts of one queue's generations.

    :param kind: The producer's: the folder in which the queues of its broker are.
    :param staging: The shared folder, as a URI; ``None``: they live in this process alone.
    :param queue: As the producer's options name it.
    :param failures: Opens what is known of failures among the queue's files.
    :param files: These, if not those of the staging folder.
    """

    def __init__(
        self,
        kind: str,
        staging: str | None,
        queue: str,
        *,
        failures: Callable[[StateFiles], Failures],
        files: StateFiles | None = None,
    ) -> None:
        self._kind = kind
        self._staging = staging
        self._queue = queue
        self._files = files or state_files(staging, f"{kind}/{digest(queue)}")
        self.failures = failures(self._files)
        #: Day → the folders of the generations that ended then.
        self._ended: dict[str, set[str]] = {}

    @property
    def durable(self) -> bool:
        """Whether other processes see them."""
        return self._files.durable

    def open(self, generation: str, oldest: str) -> Receipts:
        """Those of a new generation, for its source; this process finds them from now on.

        :param oldest: What ended before this day is forgotten.
        """
        forget_ended(self._files, oldest)
        receipts = Receipts(self._files, generation)
        with _here_lock:
            while len(_here) >= _KEPT_GENERATIONS:
                old = next((key for key, each in _here.items() if each.report is not None), None)
                if old is None:
                    break
                del _here[old]
            _here[self._key(generation)] = receipts
        return receipts

    def of(self, generation: str) -> Receipts:
        """Those of a generation, as they are now."""
        with _here_lock:
            receipts = _here.get(self._key(generation))
        if receipts is None:
            receipts = Receipts(self._files, generation)
            receipts.load()
        return receipts

    def open_ones(self, own: str) -> set[str]:
        """The folders of the generations that nobody has settled yet, but for one's own.

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
        """Those of another generation, by the name of its folder, as they are now."""
        receipts = Receipts(self._files, folder=folder)
        receipts.load()
        return receipts

    def is_open(self, generation: str) -> bool:
        """Whether this process receives for it, or keeps its receipts."""
        with _here_lock:
            return self._key(generation) in _here

    def ended(self, generation: str) -> bool:
        """Whether a generation has been settled, by anybody."""
        with _here_lock:
            receipts = _here.get(self._key(generation))
        return (receipts or Receipts(self._files, generation)).ended()

    def close(self, generation: str) -> None:
        """The source has ended: from now on its receipts are read from their files, if any."""
        if self.durable:
            with _here_lock:
                _here.pop(self._key(generation), None)

    def _key(self, generation: str) -> tuple[str, str | None, str, str]:
        return self._kind, self._staging, self._queue, generation
