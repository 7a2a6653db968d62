"""Where a pipeline writes to: emptied before each case, and read after it.

Both are functions of the user's.  Each is called in a process of its own: the one that forks the
tasks must hold no connection that a fork could not share.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any
from uuid import UUID

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.testing.crashes.forked import ForkError, forked

#: Returns the rows that the sink holds: JSON values.  It gets the folder of the case.
Sink = Callable[[Path], Iterable[Any]]
#: Empties a sink that is elsewhere; it gets the folder of the case.
Prepare = Callable[[Path], object]

#: What has one plain text.
_PLAIN = (bytes, date, datetime, time, timedelta, Decimal, PurePath, UUID)


class SinkError(BroadwayError):
    """A function that reads or empties the sink failed."""


def rows_of(sink: Sink, folder: Path, log: Path, ids: Sequence[str]) -> Counter[str]:
    """The rows of a sink, each as JSON, and how often it is there.

    An id of a message differs in each case, so its place stands for it: ``<message 1>``.

    :raises SinkError: If the sink fails, or returns what is no JSON value.
    """
    rows: list[str] = _apart(
        lambda: [json.dumps(row, sort_keys=True, default=_plain) for row in sink(folder)],
        folder,
        log,
    )
    places = {key: f"<message {place}>" for place, key in enumerate(ids, 1)}
    if not places:
        return Counter(rows)
    known = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, places))})(?!\w)")
    return Counter(known.sub(lambda found: places[found[0]], row) for row in rows)


def prepare(function: Prepare, folder: Path, log: Path) -> None:
    """Empty a sink.

    :raises SinkError: If that fails.
    """

    def empty() -> None:
        function(folder)

    _apart(empty, folder, log)


def _plain(value: Any) -> Any:
    """What JSON has for a value that is not its own."""
    if isinstance(value, _PLAIN):
        return str(value)
    if isinstance(value, AbstractSet):
        return sorted(value)
    if hasattr(value, "keys"):  # rows of database clients
        return {key: value[key] for key in value.keys()}  # noqa: SIM118 - of a row, not a dict
    raise TypeError(f"a row of the sink holds {type(value).__name__}, which is no JSON value")


def _apart(do: Callable[[], Any], folder: Path, log: Path) -> Any:
    try:
        return forked(do, folder, log, "the sink")
    except ForkError as error:
        raise SinkError(str(error)) from None
