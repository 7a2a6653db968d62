"""The sink of a pipeline: emptied before each case, and read after it, by functions of the user.

Each function is called in a separate process, because the process that forks the tasks must not
have open connections.
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

#: Returns the rows of the sink as JSON values; called with the folder of the case.
Sink = Callable[[Path], Iterable[Any]]
#: Empties a sink outside the folder; called with the folder of the case.
Prepare = Callable[[Path], object]

#: Types that are serialized by ``str``.
_PLAIN = (bytes, date, datetime, time, timedelta, Decimal, PurePath, UUID)


class SinkError(BroadwayError):
    """A function that reads or empties the sink failed."""


def rows_of(sink: Sink, folder: Path, log: Path, ids: Sequence[str]) -> Counter[str]:
    """Counts the rows of a sink, as JSON texts.

    Message ids differ between cases, so they are replaced by numbers: ``<message 1>``.

    :raises SinkError: If the sink fails, or returns something other than JSON values.
    """
    rows: list[str] = _run_forked(
        lambda: [json.dumps(row, sort_keys=True, default=_plain) for row in sink(folder)],
        folder,
        log,
    )
    places = {key: f"<message {place}>" for place, key in enumerate(ids, 1)}
    if not places:
        return Counter(rows)
    known = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, places))})(?!\w)")
    return Counter(known.sub(lambda match: places[match[0]], row) for row in rows)


def prepare(function: Prepare, folder: Path, log: Path) -> None:
    """Empties a sink.

    :raises SinkError: If the function fails.
    """

    def empty() -> None:
        function(folder)

    _run_forked(empty, folder, log)


def _plain(value: Any) -> Any:
    """Converts a value that JSON does not support."""
    if isinstance(value, _PLAIN):
        return str(value)
    if isinstance(value, AbstractSet):
        return sorted(value)
    if hasattr(value, "keys"):  # rows of database clients
        return {key: value[key] for key in value.keys()}  # noqa: SIM118 - of a row, not a dict
    raise TypeError(f"a row of the sink holds {type(value).__name__}, which is no JSON value")


def _run_forked(do: Callable[[], Any], folder: Path, log: Path) -> Any:
    try:
        return forked(do, folder, log, "the sink")
    except ForkError as error:
        raise SinkError(str(error)) from None
