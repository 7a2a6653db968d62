"""What settling has done, kept in staging so that a killed settlement goes on where it was.

One folder per generation, ``<staging>/rabbitmq/<queue>/<generation>/`` (both hashed), in which its
:class:`GenerationLog` is too.  Beside them ``due/<epoch>-<generation>.json``: when its lease queue
may be looked at again, under the lease queue's own hash until a generation uses it, and
``claims/<lease queue>/<generation>.json``: whose it is, and ``relied/<queue>.json``: which of the
queues that stay are old enough to be relied on::

    opened.json     the lease queue is declared: from now on bundles may be in it
    turn-*.json     who settles and publishes failures again: two turns may publish one twice
    now-*.json      what callbacks settled at once
    settled.json    settling is done but for deleting the lease queue: the report, and the bundles
                    and messages that it is true of

Losing these files loses no message: bundles that come back are then handled again, marked.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.kit.generation_log import GenerationLog, Settled
from airflow_broadway.producers.kit.state_files import digest, state_files

__all__ = ["Due", "QueueJournal", "Turns", "digest"]

log = logging.getLogger(__name__)

_DUE = re.compile(r"(-?\d+)-([0-9a-f]+)\.json")
_TURN = re.compile(r"turn-(.+)\.json")
#: Generations whose turns are kept at a time.
_KEPT_GENERATIONS = 1_000


class Due(NamedTuple):
    """A lease queue that may be looked at again.

    :param gone: Whether it was found gone before: only its journal is left.
    :param sure: From when on it need not be asked for what shows in no count.
    :param empty: Whether the returns queue was empty when it was looked at last.
    :param unused: Whether it was declared, and may never have come into use.
    """

    name: str
    folder: str
    queue: str
    gone: bool
    sure: float
    empty: bool = False
    unused: bool = False


class QueueJournal:
    """The journals of one source queue's generations.

    :param staging: A folder URI; with ``None`` they are kept in memory, for tests and trials.
    """

    def __init__(self, staging: str | None, queue: str) -> None:
        #: Where they lie, and the bundles of staged custody beside them.
        self.files = state_files(staging, f"rabbitmq/{digest(queue)}")
        # Notes of what was declared here, by lease queue, while nothing else tells of it.
        self._unused: dict[str, str] = {}

    def _log(self, generation: str) -> GenerationLog:
        return GenerationLog(self.files, generation)

    def claim(self, queue: str, generation: str) -> bool:
        """Make a lease queue the generation's alone, for ever; whether it is.

        Of two that claim one at the same instant neither has it.  A broker may hand out a spare
        queue's name twice, and a stranger may write down the name of one that is in use.
        """
        folder, own = f"claims/{digest(queue)}", f"{digest(generation)}.json"
        self.files.write(f"{folder}/{own}", {"queue": queue, "generation": generation})
        return self.files.names(folder) == [own]

    def note_unused(self, queue: str, at: float) -> None:
        """Note, before that is done, that a lease queue is declared or taken.

        Else nobody would delete the one of a process that dies before it notes more.

        :param at: From when on it may be deleted, unless it came into use; seconds since the epoch.
        """
        name = f"due/{at:.0f}-{digest(queue)}.json"
        self.files.write(name, {"queue": queue, "sure": at, "unused": True})
        self._unused[queue] = name

    def note_used(self, queue: str) -> None:
        """Note that something else tells of a lease queue."""
        name = self._unused.pop(queue, None)
        if name is not None:
            self.files.remove(name)

    def is_used(self, queue: str) -> bool:
        """Whether a generation ever had bundles in a lease queue; if not, none will from now on."""
        if self.claim(queue, ""):
            return False
        # A generation that lost its connection right after its claim uses another one.
        claims = self.files.names(f"claims/{digest(queue)}")
        return any(self._opened_by(each[:-5]) in (queue, None) for each in claims)

    def _opened_by(self, folder: str) -> str | None:
        """The lease queue that a generation uses, empty if none; ``None``: nobody can tell."""
        try:
            value = self._read(f"{folder}/opened.json")
            return "" if value is None else str(value["queue"])
        except (StagingError, KeyError, TypeError, ValueError) as error:
            log.warning("%s cannot be read: %s", f"{folder}/opened.json", error)
            return None

    def note_opened(self, generation: str, queue: str, due: float, sure: float) -> None:
        """Note that a lease queue is there: from now on bundles may be in it.

        :param due: From when on it may be looked at; seconds since the epoch.
        :param sure: From when on it may be deleted if it looks empty.
        """
        value = {"queue": queue, "sure": sure}
        self.files.write(f"due/{due:.0f}-{digest(generation)}.json", value)
        self.files.write(f"{digest(generation)}/opened.json", {"queue": queue})
        self.note_used(queue)

    def opened(self, generation: str) -> str | None:
        """The generation's lease queue, if bundles may be in it."""
        value = self._read(f"{digest(generation)}/opened.json")
        return None if value is None else str(value["queue"])

    def settled(self, generation: str) -> Settled | None:
        """What a settlement did, if it got as far; its details are ``bundles`` and ``messages``."""
        return self._log(generation).settled()

    def note_settled(
        self,
        generation: str,
        report: SettleReport,
        bundles: Iterable[str] | None,
        *,
        messages: Mapping[str, Action] | None = None,
    ) -> None:
        """Note that all verdicts are carried out.

        :param bundles: The bundles that this is true of; ``None``: all.
        :param messages: The messages of other bundles that it is true of: message id → action.
        """
        self._log(generation).end(
            report,
            replace=True,
            bundles=None if bundles is None else list(bundles),
            messages={key: action.value for key, action in (messages or {}).items()},
        )

    def turns(self, generation: str) -> frozenset[str]:
        """The turns in which messages were published again; none if they cannot be read."""
        try:
            names = self._log(generation).names()
        except StagingError as error:
            log.warning("What a settlement published cannot be read: %s", error)
            return frozenset()
        return frozenset(match[1] for match in map(_TURN.fullmatch, names) if match)

    def note_turn(self, generation: str, *, whole: bool) -> tuple[str, bool]:
        """Note, before the first is, that messages are published again.

        :param whole: Whether the whole generation is settled; else some messages, once.
        :returns: A name for this turn, and whether another is to settle the whole, or was.
        """
        turn = uuid.uuid4().hex[:12]
        name = turn if whole else f"now-{turn}"
        # Written first, then looked: of two that settle at once, one at least sees the other.
        self._log(generation).write(f"turn-{name}.json", {})
        others = self.turns(generation) - {name}
        return name, whole and any(not each.startswith("now-") for each in others)

    def note_now(self, generation: str, actions: Mapping[str, Action]) -> None:
        """Note what callbacks settled at once: message id → action."""
        self._log(generation).note_now(actions)

    def now(self, generation: str) -> dict[str, Action]:
        """All messages that were settled one by one: by callbacks, or without their bundles."""
        return self._now(generation, self.settled(generation))

    def _now(self, generation: str, settled: Settled | None) -> dict[str, Action]:
        messages = {} if settled is None else settled.details["messages"]
        alone = {key: Action(action) for key, action in messages.items()}
        return alone | self._log(generation).now()

    def seen_type(self, now: float) -> bool:
        """Whether the source queue was found to be no stream within a day.

        :param now: Seconds since the epoch.
        """
        value = self._read("type.json")
        return value is not None and 0 <= now - float(value["at"]) < 86400.0

    def note_type(self, now: float) -> None:
        """Note that the source queue is no stream."""
        self.files.write("type.json", {"at": now})

    def relied(self, queue: str) -> bool | None:
        """Whether one of our queues may be relied on: it answered when it was old enough.

        :returns: ``None`` if nothing is noted of it; ``False`` if a run is known to have declared
            it, and nobody relied on it since.
        """
        value = self._read(f"relied/{digest(queue)}.json")
        return None if value is None else bool(value.get("relied"))

    def note_declared(self, queue: str) -> None:
        """Note, before that is done, that a queue which was not there is declared."""
        self.files.write(f"relied/{digest(queue)}.json", {"queue": queue, "relied": False})

    def note_relied(self, queue: str) -> None:
        """Note, before anything is published to it, that a queue may be relied on."""
        self.files.write(f"relied/{digest(queue)}.json", {"queue": queue, "relied": True})

    def limit(self) -> int | None:
        """The broker's ``max_message_size``, where it refused a bundle for it."""
        value = self._read("limit.json")
        return None if value is None else int(value["bytes"])

    def note_limit(self, size: int) -> None:
        """Note that the broker takes no message of more than ``size`` bytes."""
        self.files.write("limit.json", {"bytes": size})

    def due(self, now: float) -> list[Due]:
        """The lease queues that may be looked at again."""
        found = []
        for name in self.files.names("due"):
            match = _DUE.fullmatch(name)  # what has another name is not ours
            if match is None or float(match[1]) > now:
                continue
            try:
                value = self._read(f"due/{name}")
                if value is not None:
                    gone, sure = bool(value.get("gone")), float(value.get("sure", str(match[1])))
                    queue, empty = str(value.get("queue")), bool(value.get("empty"))
                    unused = bool(value.get("unused"))
                    found.append(Due(name, match[2], queue, gone, sure, empty, unused))
            except (StagingError, TypeError, ValueError, AttributeError) as error:
                log.warning("%s is passed over, and should be removed: %s", f"due/{name}", error)
        return found

    def put_off(self, due: Due, at: float, *, gone: bool, empty: bool = False) -> None:
        """Look at a lease queue again from ``at`` on.

        :param gone: Whether it is gone, so that only its journal is left.
        :param empty: Whether the returns queue is empty.
        """
        value = {"queue": due.queue, "gone": gone, "sure": due.sure, "empty": empty}
        if due.unused:
            value["unused"] = True
        self.files.write(f"due/{at:.0f}-{due.folder}.json", value)
        self.files.remove(f"due/{due.name}")

    def drop(self, due: Due) -> None:
        """Do not look at a lease queue again by this note."""
        self.files.remove(f"due/{due.name}")

    def forget(self, due: Due) -> None:
        """Remove all that was noted of a generation."""
        self.files.remove(due.folder)
        self.files.remove(f"claims/{digest(due.queue)}")
        self.files.remove(f"due/{due.name}")

    def done(self, generation: str, bundle: str | None) -> Mapping[str, Action] | None:
        """What needs no handling any more of a bundle that came back; ``None``: all of it.

        :param bundle: Its name; ``None`` for one that was given back on purpose.
        :returns: Messages that were settled one by one: message id → action.
        """
        settled = self.settled(generation)
        if settled is not None and bundle is not None:
            bundles = settled.details["bundles"]
            if bundles is None or bundle in bundles:
                return None
        return self._now(generation, settled)

    def _read(self, name: str) -> dict[str, Any] | None:
        value = self.files.read(name)
        return None if value is None else dict(value)


class Turns:
    """In which turns generations published messages again, as their journals say.

    Whoever publishes may name any generation: so the latest are kept, and no file is read but where
    it keeps no connection waiting.
    """

    def __init__(self, journal: QueueJournal) -> None:
        self._journal = journal
        self._known: dict[str, frozenset[str]] = {}

    def of(self, generation: str) -> frozenset[str] | None:
        """Its turns; ``None`` if its journal is to be read first."""
        return self._known.get(generation)

    def read(self, generation: str) -> None:
        """Read its journal, unless that was done just now."""
        if generation in self._known:
            return
        if len(self._known) >= _KEPT_GENERATIONS:
            del self._known[next(iter(self._known))]
        self._known[generation] = self._journal.turns(generation)
