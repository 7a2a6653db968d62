"""The record of what a settlement did, kept in staging so that a killed settlement goes on.

One folder per generation, ``rabbitmq/<queue>/<generation>/`` (both hashed) below the folder that
all pipelines of the staging root share: its :class:`GenerationLog`, and::

    opened.json     the generation's holding queue: from now on bundles may be in it
    closed.json     it is released: it may not begin
    turn-*.json     one settling that publishes messages: two turns may publish one twice
    settled.json    created once: settling is done but for emptying the holding queue, with the
                    report, the bundles that it covers, and the messages of these that failed; or
                    ``swept``: its lease had lapsed, and another run takes over what it held
    done-*.json     what a sweep released of bundles that it had to leave

Beside them, in the pipeline's own folder, ``relied/<queue>.json``: which of our queues are old
enough to be relied on.  Losing these files loses no message: bundles are then handled again,
marked.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable
from datetime import datetime

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.kit.generation_log import GenerationLog, Settled, forget_ended
from airflow_broadway.producers.kit.state_files import day_of, digest, state_files

log = logging.getLogger(__name__)

_TURN = re.compile(r"turn-(.+)\.json")
#: Generations whose turns are kept at a time.
_KEPT_GENERATIONS = 1_000
#: Days for which a generation's log outlives its lease.
_KEPT_DAYS = 7


class QueueJournal:
    """The journals of one source queue's generations.

    :param staging: The pipeline's folder, as a URI; ``None``: all is kept in memory.
    :param shared: The folder of all pipelines; the pipeline's own without one.
    """

    def __init__(self, staging: str | None, queue: str, shared: str | None = None) -> None:
        folder = f"rabbitmq/{digest(queue)}"
        self._notes = state_files(staging, folder)
        self._files = state_files(shared or staging, folder)

    def log_of(self, generation: str) -> GenerationLog:
        """The log of a generation."""
        return GenerationLog(self._files, generation)

    # -- how a generation begins and ends ------------------------------------------------------

    def note_opened(self, generation: str, queue: str, deadline: datetime) -> None:
        """Note, before it is bound, a generation's holding queue.

        :param deadline: When its lease lapses.
        """
        entry = self.log_of(generation)
        self._files.write(f"ended/{day_of(deadline)}/{entry.folder}.json", {})
        entry.write("opened.json", {"queue": queue})

    def opened(self, generation: str) -> str | None:
        """The generation's holding queue, if bundles may be in it."""
        value = self._files.read(self.log_of(generation).path("opened.json"))
        return None if value is None else str(value["queue"])

    def note_closed(self, generation: str, now: datetime) -> None:
        """Note that a generation which holds nothing may not begin."""
        entry = self.log_of(generation)
        self._files.write(f"ended/{day_of(now)}/{entry.folder}.json", {})
        entry.write("closed.json", {})

    def is_over(self, generation: str) -> bool:
        """Whether a generation may hold nothing any more."""
        names = {"closed.json", "settled.json"}
        return not names.isdisjoint(self.log_of(generation).names())

    def forget(self, now: datetime) -> None:
        """Remove the logs of generations whose lease ended long ago."""
        forget_ended(self._files, day_of(now, before=_KEPT_DAYS))

    # -- settling ------------------------------------------------------------------------------

    def note_settled(
        self,
        generation: str,
        report: SettleReport,
        bundles: Iterable[str] | None,
        failed: Iterable[str] = (),
        *,
        replace: bool = False,
    ) -> Settled:
        """Note that all verdicts are carried out, unless that or a sweep is noted.

        :param bundles: The bundles that this covers; ``None``: all.
        :param failed: The messages of them that are still to be handled.
        :param replace: Whether this report stands, and not the noted one.
        :returns: What stands.
        """
        covered = None if bundles is None else list(bundles)
        return self.log_of(generation).end(
            report, replace=replace, bundles=covered, failed=list(failed)
        )

    def note_swept(self, generation: str) -> Settled:
        """Note, before any message moves, that another run takes over what a generation held.

        :returns: What stands.
        """
        return self.log_of(generation).end(SettleReport(), bundles=[], failed=[], swept=True)

    def turns(self, generation: str) -> frozenset[str]:
        """The turns in which messages were published again; none if they cannot be read."""
        try:
            names = self.log_of(generation).names()
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
        # Written first, then listed: of two that settle together, one at least sees the other.
        self.log_of(generation).write(f"turn-{name}.json", {})
        others = self.turns(generation) - {name}
        return name, whole and any(not other.startswith("now-") for other in others)

    # -- the broker's queues -------------------------------------------------------------------

    def seen_type(self, now: float) -> bool:
        """Whether the source queue was found to be no stream within a day.

        :param now: Seconds since the epoch.
        """
        value = self._notes.read("type.json")
        return value is not None and 0 <= now - float(value["at"]) < 86400.0

    def note_type(self, now: float) -> None:
        """Note that the source queue is no stream."""
        self._notes.write("type.json", {"at": now})

    def relied(self, queue: str) -> bool | None:
        """Whether one of our queues may be relied on: it answered when it was old enough.

        :returns: ``None`` if nothing is noted of it; ``False`` if a run is known to have declared
            it, and none has relied on it since.
        """
        value = self._notes.read(f"relied/{digest(queue)}.json")
        return None if value is None else bool(value.get("relied"))

    def note_declared(self, queue: str) -> None:
        """Note, before that is done, that a missing queue is declared."""
        self._notes.write(f"relied/{digest(queue)}.json", {"queue": queue, "relied": False})

    def note_relied(self, queue: str) -> None:
        """Note, before anything is published to it, that a queue may be relied on."""
        self._notes.write(f"relied/{digest(queue)}.json", {"queue": queue, "relied": True})


def is_swept(settled: Settled | None) -> bool:
    """Whether another run takes over what the generation held."""
    return settled is not None and "swept" in settled.details


class Turns:
    """The turns in which generations published messages again, by their journals.

    Any publisher may name any generation: so the latest are kept, and no file is read but where it
    keeps no connection waiting.
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
