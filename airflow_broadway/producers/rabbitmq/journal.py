"""The journal of settlements, kept in staging so that a killed settlement can be resumed.

It has one folder per generation, ``rabbitmq/<queue>/<generation>/`` (both hashed), in the folder
that all pipelines of the staging root share: the :class:`GenerationLog`, and::

    opened.json     the generation's holding queue: from now on bundles may be in it
    closed.json     the generation is released: it may not begin
    turn-*.json     a settlement that publishes messages: two turns may publish a message twice
    settled.json    created once, when only emptying the holding queue remains: the report, the
                    bundles that it covers, and their messages that failed; or ``swept``: the lease
                    had lapsed, and another run takes over the generation's messages
    done-*.json     the messages that a sweep released from bundles that it could not acknowledge

The pipeline's own folder has ``relied/<queue>.json``: which of our queues are old enough to be
relied on.  Losing these files loses no message: bundles are then redelivered, marked.
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
#: The number of generations whose turns are cached.
_KEPT_GENERATIONS = 1_000
#: Days for which a generation's log outlives its lease.
_KEPT_DAYS = 7


class QueueJournal:
    """The journals of one source queue's generations.

    :param staging: The pipeline's folder, as a URI; ``None`` keeps everything in memory.
    :param shared: The folder of all pipelines; by default the pipeline's own.
    """

    def __init__(self, staging: str | None, queue: str, shared: str | None = None) -> None:
        folder = f"rabbitmq/{digest(queue)}"
        self._local = state_files(staging, folder)
        self._files = state_files(shared or staging, folder)

    def log_of(self, generation: str) -> GenerationLog:
        """Returns the log of a generation."""
        return GenerationLog(self._files, generation)

    # -- a generation's begin and end ----------------------------------------------------------

    def note_opened(self, generation: str, queue: str, deadline: datetime) -> None:
        """Records a generation's holding queue, before the queue is bound.

        :param deadline: The end of the generation's lease.
        """
        entry = self.log_of(generation)
        self._files.write(f"ended/{day_of(deadline)}/{entry.folder}.json", {})
        entry.write("opened.json", {"queue": queue})

    def opened(self, generation: str) -> str | None:
        """Returns the generation's holding queue, if bundles may be in it."""
        value = self._files.read(self.log_of(generation).path("opened.json"))
        return None if value is None else str(value["queue"])

    def note_closed(self, generation: str, now: datetime) -> None:
        """Records that a generation without messages may not begin."""
        entry = self.log_of(generation)
        self._files.write(f"ended/{day_of(now)}/{entry.folder}.json", {})
        entry.write("closed.json", {})

    def is_over(self, generation: str) -> bool:
        """Whether a generation may no longer hold messages."""
        names = {"closed.json", "settled.json"}
        return not names.isdisjoint(self.log_of(generation).names())

    def forget(self, now: datetime) -> None:
        """Removes the logs of generations whose lease ended long ago."""
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
        """Records that all verdicts are carried out, unless that or a sweep is recorded already.

        :param bundles: The bundles that this covers; ``None``: all.
        :param failed: Their messages that are not settled yet.
        :param replace: Whether this report replaces a recorded one.
        :returns: The record in effect.
        """
        covered = None if bundles is None else list(bundles)
        return self.log_of(generation).end(
            report, replace=replace, bundles=covered, failed=list(failed)
        )

    def note_swept(self, generation: str) -> Settled:
        """Records that another run takes over a generation's messages, before any is published.

        :returns: The record in effect.
        """
        return self.log_of(generation).end(SettleReport(), bundles=[], failed=[], swept=True)

    def turns(self, generation: str) -> frozenset[str]:
        """Returns the turns that republished messages; none if they cannot be read."""
        try:
            names = self.log_of(generation).names()
        except StagingError as error:
            log.warning("The journal of a settlement cannot be read: %s", error)
            return frozenset()
        return frozenset(match[1] for match in map(_TURN.fullmatch, names) if match)

    def note_turn(self, generation: str, *, whole: bool) -> tuple[str, bool]:
        """Records that messages will be republished, before the first one is.

        :param whole: Whether the whole generation is settled; else some messages, once.
        :returns: The name of this turn, and whether another turn for the whole is recorded.
        """
        turn = uuid.uuid4().hex[:12]
        name = turn if whole else f"now-{turn}"
        # Written first, then listed: of two concurrent settlements, at least one sees the other.
        self.log_of(generation).write(f"turn-{name}.json", {})
        others = self.turns(generation) - {name}
        return name, whole and any(not other.startswith("now-") for other in others)

    # -- the broker's queues -------------------------------------------------------------------

    def seen_type(self, now: float) -> bool:
        """Whether a check within the last day found that the source queue is not a stream.

        :param now: Seconds since the epoch.
        """
        value = self._local.read("type.json")
        return value is not None and 0 <= now - float(value["at"]) < 86400.0

    def note_type(self, now: float) -> None:
        """Records that the source queue is not a stream."""
        self._local.write("type.json", {"at": now})

    def relied(self, queue: str) -> bool | None:
        """Whether one of our queues may be relied on: it responded when it was old enough.

        :returns: ``None`` without a record; ``False`` if a run declared the queue, and no run has
            relied on it since.
        """
        value = self._local.read(f"relied/{digest(queue)}.json")
        return None if value is None else bool(value.get("relied"))

    def note_declared(self, queue: str) -> None:
        """Records that a missing queue will be declared, before it is."""
        self._local.write(f"relied/{digest(queue)}.json", {"queue": queue, "relied": False})

    def note_relied(self, queue: str) -> None:
        """Records that a queue may be relied on, before the first publish to it."""
        self._local.write(f"relied/{digest(queue)}.json", {"queue": queue, "relied": True})


def is_swept(settled: Settled | None) -> bool:
    """Whether another run takes over the generation's messages."""
    return settled is not None and "swept" in settled.details


class Turns:
    """A cache of the turns in which generations republished messages, read from their journals.

    Any publisher can name any generation in a header, so the cache is bounded, and journals are
    read outside the connection's thread.
    """

    def __init__(self, journal: QueueJournal) -> None:
        self._journal = journal
        self._known: dict[str, frozenset[str]] = {}

    def of(self, generation: str) -> frozenset[str] | None:
        """Returns a generation's turns; ``None`` until :meth:`read` has read its journal."""
        return self._known.get(generation)

    def read(self, generation: str) -> None:
        """Reads a generation's journal, unless it is cached."""
        if generation in self._known:
            return
        if len(self._known) >= _KEPT_GENERATIONS:
            del self._known[next(iter(self._known))]
        self._known[generation] = self._journal.turns(generation)
