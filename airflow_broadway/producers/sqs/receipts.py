"""The receipts that one generation holds: which, until when, and what became of them.

A receipt handle is all that settles an SQS message, and whoever renews or settles it is another
process than the one that received it.  So the source writes the receipts down, in portions, before
any callback sees a message: that is how SQS *secures*.  Below the pipeline's staging folder::

    sqs/<queue>/<generation>/
        receipts-000000.json    a portion: its instants, and id, receipt and group of each message
        renewed.json            all that was there is held until then
        now-*.json              what callbacks settled at once: id → action
        begun.json              settling has begun
        done-*.json             what settling has carried out so far: id → action
        lost-*.json             ids whose receipt SQS refused
        settled.json            settling is done: the report; nothing else is left then
    sqs/<queue>/ended/<day>/<generation>.json    which folders a later run may remove

Losing these files loses no message: all come back when their visibility timeout is over.  Without a
staging folder the book is in this process's memory alone.

Instants are seconds since the epoch, by the producer's clock, never SQS's: it accepts a receipt
whose time is over as long as nobody else has the message, and so cannot be asked.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from airflow_broadway.core.custody.protocol import Action, SettleReport
from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.kit.state_files import Damaged, StateFiles, digest
from airflow_broadway.producers.sqs.failures import Failures

__all__ = ["COUNTED", "KEPT_REPORTS", "Receipts", "ReceiptsFolder", "report_of"]

log = logging.getLogger(__name__)

_VERSION = 1
#: Days for which the report of a settled generation is kept.
KEPT_REPORTS = 7
#: Books that a process keeps after their end, so that settling again reports the same.
_KEPT = 256

COUNTED: dict[Action, str] = {
    Action.ACK: "acked",
    Action.RETRY: "requeued",
    Action.DEAD_LETTER: "dead_lettered",
    Action.LEAVE: "left",
    Action.RELEASE: "released",
}


def report_of(
    actions: Mapping[Action, int],
    *,
    lapsed: int = 0,
    failed: int = 0,
    errors: Iterable[str] = (),
) -> SettleReport:
    """A report by counts of actions."""
    counts: dict[str, Any] = {COUNTED[action]: count for action, count in actions.items() if count}
    return SettleReport(**counts, lapsed=lapsed, failed=failed, errors=tuple(dict.fromkeys(errors)))


class Receipts:
    """One generation's receipts; shared by the threads of a process.

    :param notes: Where they are written down; ``None``: nowhere.
    :param name: The generation's folder there.
    """

    def __init__(self, notes: StateFiles | None, name: str) -> None:
        self._notes = notes
        self._name = name
        self._lock = threading.Lock()
        self._portions = 0
        #: Message id → its newest receipt, in order of arrival.
        self.receipts: dict[str, str] = {}
        #: Message id → its message group, of a FIFO queue.
        self.groups: dict[str, str] = {}
        #: When the first message was asked for: 12 hours run from it.
        self.since: float | None = None
        #: [held until, ids], a portion each.
        self._spans: list[tuple[float, list[str]]] = []
        #: What callbacks settled at once.
        self.now: dict[str, Action] = {}
        #: What an unfinished settlement has carried out.
        self.done: dict[str, Action] = {}
        #: Ids whose receipt SQS refused: somebody else has them, or will.
        self.lost: set[str] = set()
        #: Groups of which something was given back.
        self.blocked: set[str] = set()
        #: Whether a settlement began before this one.
        self.begun = False
        #: Ids for which something was asked of SQS whose answer never came.
        self.unanswered: set[str] = set()
        self.report: SettleReport | None = None

    # -- what is held --------------------------------------------------------------------------

    @property
    def until(self) -> float | None:
        """Until when everything in it is held; ``None`` if nothing is in it."""
        with self._lock:
            return min((until for until, _ in self._spans), default=None)

    def held(self) -> list[str]:
        """The ids that are neither settled nor lost, in order of arrival."""
        with self._lock:
            gone = self.now.keys() | self.lost
            return [each for each in self.receipts if each not in gone]

    def knows(self, message_id: str) -> bool:
        """Whether this generation has received it before."""
        return message_id in self.receipts

    # -- receiving -----------------------------------------------------------------------------

    def add(
        self, messages: Mapping[str, str], groups: Mapping[str, str], since: float, until: float
    ) -> None:
        """Take receipts into the book, in memory.

        :param messages: Message id → receipt; of one that is there already, the newer receipt.
        """
        with self._lock:
            self.receipts.update(messages)
            self.groups.update(groups)
            self.since = since if self.since is None else min(self.since, since)
            self._spans.append((until, list(messages)))

    def write(
        self, messages: Mapping[str, str], groups: Mapping[str, str], since: float, until: float
    ) -> None:
        """Write receipts down where other processes find them.

        :raises StagingError: If they cannot be written.
        """
        if self._notes is None:
            return
        name = f"{self._name}/receipts-{self._portions:06d}.json"
        self._portions += 1
        held = [
            [each, receipt, groups[each]] if each in groups else [each, receipt]
            for each, receipt in messages.items()
        ]
        self._notes.write(name, {"version": _VERSION, "since": since, "until": until, "held": held})

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
        if self._notes is not None:
            self._notes.write(f"{self._name}/renewed.json", {"until": everything})

    def lose(self, ids: Iterable[str]) -> None:
        """Note ids whose receipt SQS refuses: they are not asked for again."""
        lost = list(ids)
        with self._lock:
            self.lost.update(lost)
        self._note("lost", lost)

    # -- settling ------------------------------------------------------------------------------

    def note_now(self, actions: Mapping[str, Action]) -> None:
        """Note what callbacks settled at once."""
        with self._lock:
            self.now.update(actions)
        self._note("now", {each: action.value for each, action in actions.items()})

    def begin(self) -> None:
        """Note that settling begins."""
        if self._notes is not None and not self.begun:
            self._notes.write(f"{self._name}/begun.json", {})
        self.begun = True

    def note_done(self, actions: Mapping[str, Action]) -> None:
        """Note what settling has carried out so far."""
        self.done.update(actions)
        self._note("done", {each: action.value for each, action in actions.items()})

    def end(self, report: SettleReport, day: str) -> SettleReport:
        """Note that settling is done; nothing is held from now on.

        :param day: Today, as ``YYYY-MM-DD``.
        :returns: The report that stands: of two who settle at once, the first one's.
        """
        if self._notes is not None:
            name = f"{self._name}/settled.json"
            if not self._notes.create(name, report.to_json()):
                report = SettleReport.from_json(self._read("settled.json"))
            self._notes.write(f"ended/{day}/{self._name}.json", {})
            for name in self._notes.names(self._name):
                if name != "settled.json":
                    self._notes.remove(f"{self._name}/{name}")
        with self._lock:
            self.report = report
            self.receipts.clear()
            self.groups.clear()
            self._spans.clear()
            self.done.clear()
        return report

    def ended(self) -> bool:
        """Whether it has been settled, by anybody."""
        if self.report is not None:
            return True
        return self._notes is not None and self._notes.exists(f"{self._name}/settled.json")

    def _note(self, kind: str, value: Any) -> None:
        if value and self._notes is not None:
            self._notes.write(f"{self._name}/{kind}-{uuid.uuid4().hex}.json", value)

    # -- reading -------------------------------------------------------------------------------

    def load(self) -> None:
        """Read what other processes wrote.

        :raises StagingError: If it cannot be read.
        """
        notes = self._notes
        if notes is None:
            return
        names = set(notes.names(self._name))
        if "settled.json" in names:
            self.report = SettleReport.from_json(self._read("settled.json"))
            return
        least = self._read("renewed.json")["until"] if "renewed.json" in names else 0.0
        for name in sorted(names):
            kind = name.partition("-")[0]
            if kind == "receipts":
                try:
                    self._load_portion(self._read(name), least)
                except Damaged as error:  # its messages alone are not settled
                    log.error("%s: its messages come back by themselves", error)
            elif kind in ("now", "done"):
                actions = {each: Action(value) for each, value in self._read(name).items()}
                (self.now if kind == "now" else self.done).update(actions)
            elif kind == "lost":
                self.lost.update(self._read(name))
        self.begun = "begun.json" in names

    def refresh(self) -> None:
        """Learn until when others have renewed it since."""
        told = None if self._notes is None else self._notes.read(f"{self._name}/renewed.json")
        if told is not None:
            with self._lock:
                self._spans = [(max(until, told["until"]), ids) for until, ids in self._spans]

    def _load_portion(self, value: Any, least: float) -> None:
        if not isinstance(value, dict) or "version" not in value:
            raise Damaged(f"receipts of {self._name} are damaged")
        if value["version"] != _VERSION:
            raise StagingError(
                f"the receipts of {self._name} have format version {value['version']!r}; this"
                f" release reads {_VERSION}: use the release that wrote them"
            )
        try:
            held = value["held"]
            receipts = {each[0]: each[1] for each in held}
            groups = {each[0]: each[2] for each in held if len(each) > 2}
            since, until = float(value["since"]), float(value["until"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise Damaged(f"receipts of {self._name} are damaged") from None
        self.add(receipts, groups, since, max(until, least))
        self._portions += 1

    def _read(self, name: str) -> Any:
        value = self._notes.read(f"{self._name}/{name}") if self._notes is not None else None
        if value is None:
            raise StagingError(f"the note {name} of {self._name} is gone")
        return value


#: Books of the generations that this process receives, and of some that it has ended.
_here: dict[tuple[str | None, str, str], Receipts] = {}
_here_lock = threading.Lock()


class ReceiptsFolder:
    """The books of one queue.

    :param staging: The pipeline's folder, as a URI; ``None``: books live in this process alone.
    """

    def __init__(self, staging: str | None, queue: str) -> None:
        self._staging = staging
        self._queue = queue
        self._notes = None if staging is None else StateFiles(staging, f"sqs/{digest(queue)}")
        self.failures = Failures(self._notes)

    @property
    def durable(self) -> bool:
        """Whether other processes see its books."""
        return self._notes is not None

    def open(self, generation: str, oldest: str) -> Receipts:
        """A new book, for the source; this process finds it from now on.

        :param oldest: What ended before this day is forgotten.
        """
        if self._notes is not None:
            for day in self._notes.names("ended"):
                if day < oldest:
                    for name in self._notes.names(f"ended/{day}"):
                        self._notes.remove(name.removesuffix(".json"))
                    self._notes.remove(f"ended/{day}")
        book = Receipts(self._notes, digest(generation))
        with _here_lock:
            while len(_here) >= _KEPT:
                old = next((key for key, each in _here.items() if each.report is not None), None)
                if old is None:
                    break
                del _here[old]
            _here[self._staging, self._queue, generation] = book
        return book

    def book(self, generation: str) -> Receipts:
        """The book of a generation, as it is now."""
        with _here_lock:
            book = _here.get((self._staging, self._queue, generation))
        if book is None:
            book = Receipts(self._notes, digest(generation))
            book.load()
        return book

    def is_open(self, generation: str) -> bool:
        """Whether this process receives for it, or keeps its book."""
        with _here_lock:
            return (self._staging, self._queue, generation) in _here

    def ended(self, generation: str) -> bool:
        """Whether a generation has been settled, by anybody."""
        with _here_lock:
            book = _here.get((self._staging, self._queue, generation))
        return (book or Receipts(self._notes, digest(generation))).ended()

    def close(self, generation: str) -> None:
        """The source has ended: from now on the book is read from its notes, if it has any."""
        if self._notes is not None:
            with _here_lock:
                _here.pop((self._staging, self._queue, generation), None)
