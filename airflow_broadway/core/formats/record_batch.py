"""How the outcome of a batch is recorded, and how its exceptions are read: by Python's batches and
by Spark's alike.

In an object store each file costs a round trip to write and one to read, and small batches are
many.  So a batch has one file: its outcome, with the entries of its exceptions in it where they are
few.  Each outcome is created by itself, exclusively and durably, before the next batch of the same
thread begins: whenever a process dies, no other batch than those at work is handled again.  What is
*gathered* is copies, for who settles to read many at once; nothing depends on them, so they may be
lost, or damaged, at any time.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.formats.sums import Summing, checked

__all__ = ["GATHERED", "GATHERED_BYTES", "INLINE_BYTES", "Exceptions", "Recorder", "entry_lines"]

log = logging.getLogger(__name__)

#: Bytes of exceptions that an outcome holds itself; more have a file of their own.
INLINE_BYTES = 256 * 1024
#: Outcomes in one file of copies, and its bytes, at most (but one outcome is never parted).
GATHERED, GATHERED_BYTES = 1000, 1024 * 1024


class Exceptions(NamedTuple):
    """The exceptions of a batch as its :class:`Outcome` names or holds them."""

    lines: list[str] | None = None
    entries: str | None = None
    entries_sum: dict[str, Any] | None = None


class Recorder:
    """Records the outcomes of one plan's batches; used from many threads.

    :param writer: Part of the names of its files; of nobody else.
    """

    def __init__(self, files: Files, plan: BatchPlan, writer: str) -> None:
        self._files = files
        self._plan = plan
        self._writer = writer
        self._lock = threading.Lock()
        self._held: list[str] = []
        self._bytes = 0
        self._number = 0

    def keep(self, batch_id: str, lines: Iterable[str]) -> Exceptions:
        """Keep the exceptions of a batch, streamed: few to be held by its outcome, more in a file.

        :param lines: As :func:`dump_entry` makes them.
        """
        stream = iter(lines)
        few: list[str] = []
        size = 0
        for line in stream:
            few.append(line)
            size += len(line.encode("utf-8", "surrogatepass")) + 1
            if size > INLINE_BYTES:
                break
        else:
            return Exceptions(lines=few or None)
        # The exceptions of one batch may be streamed twice, the first time in vain.
        writer = f"{self._writer}-{uuid.uuid4().hex[:8]}"
        path = paths.outcome_entries(self._plan.path, batch_id, writer)
        summing = Summing()
        self._files.write_lines(path, summing.through(chain(few, stream)))
        return Exceptions(entries=path, entries_sum=summing.to_json())

    def record(self, outcome: Outcome) -> bool:
        """Record an outcome, durably, unless its batch has one; whether this one stands."""
        path, text = paths.outcome(self._plan.path, outcome.batch_id), outcome.dumps()
        # A client that hears no answer tries again, and meets what it wrote itself.
        if not self._files.create(path, text) and self._files.read(path) != text:
            return False
        with self._lock:
            self._held.append(text)
            self._bytes += len(text)
            if len(self._held) < GATHERED and self._bytes < GATHERED_BYTES:
                return True
            held = self._take()
        self._write(*held)
        return True

    def finish(self) -> None:
        """Write the copies that are not written yet."""
        with self._lock:
            held = self._take()
        if len(held[1]) > 1:  # of one there is no need to have two
            self._write(*held)

    def _take(self) -> tuple[int, list[str]]:
        held, self._held = self._held, []
        self._bytes = 0
        self._number += 1
        return self._number, held

    def _write(self, number: int, texts: list[str]) -> None:
        path = paths.gathered(self._plan.path, self._writer, number)
        try:
            self._files.create(path, "".join(f"{text}\n" for text in texts))
        except Exception as error:
            # The outcomes themselves are there, and are read one by one.
            log.warning("Could not gather the outcomes of %d batches: %s", len(texts), error)


def entry_lines(files: Files, path: str, total: Mapping[str, Any] | None = None) -> Iterator[str]:
    """The lines of a file of entries, or of an outcome that holds them itself.

    :param path: :attr:`Outcome.exceptions`, or any file of entries.
    :param total: The file's sum, where it is known.
    :raises StagingDamaged: At the latest at the end, if they are not as they were written.
    """
    if not path.endswith(".json"):
        yield from checked(files.lines(path), total, path)
        return
    try:
        text = files.read(path)
    except FileNotFoundError:
        raise StagingDamaged(f"{path} is not there") from None
    yield from Outcome.loads(text, path).lines or ()
