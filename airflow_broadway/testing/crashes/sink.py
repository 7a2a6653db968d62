"""The sink of a pipeline: emptied before each case, and read after it, by functions of the user.

Each function is called in a separate process, because the process that forks the tasks must not
have open connections.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any
from uuid import UUID

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.testing.crashes.subject import enter_case_folder

#: Returns the rows of the sink as JSON values; called with the folder of the case.
Sink = Callable[[Path], Iterable[Any]]
#: Empties a sink outside the folder; called with the folder of the case.
Prepare = Callable[[Path], object]

#: Types that are serialized by ``str``.
_PLAIN = (bytes, date, datetime, time, timedelta, Decimal, PurePath, UUID)


def count_rows(sink: Sink, folder: Path, log: Path, ids: Sequence[str]) -> Counter[str]:
    """Counts the rows of a sink, as JSON texts.

    Message ids differ between cases, so they are replaced by numbers: ``<message 1>``.

    :raises ForkError: If the sink fails, or returns something other than JSON values.
    """

    def read() -> list[str]:
        return [json.dumps(row, sort_keys=True, default=_to_json) for row in sink(folder)]

    rows: list[str] = call_in_fork(read, folder, log, "the sink")
    numbers = {key: f"<message {number}>" for number, key in enumerate(ids, 1)}
    if not numbers:
        return Counter(rows)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, numbers))})(?!\w)")
    return Counter(pattern.sub(lambda match: numbers[match[0]], row) for row in rows)


def prepare(function: Prepare, folder: Path, log: Path) -> None:
    """Empties a sink.

    :raises ForkError: If the function fails.
    """

    def empty() -> None:
        function(folder)

    call_in_fork(empty, folder, log, "the sink")


def _to_json(value: Any) -> Any:
    """Converts a value that JSON does not support."""
    if isinstance(value, _PLAIN):
        return str(value)
    if isinstance(value, AbstractSet):
        return sorted(value)
    if hasattr(value, "keys"):  # rows of database clients
        return {key: value[key] for key in value.keys()}  # noqa: SIM118 - of a row, not a dict
    raise TypeError(f"a row of the sink holds {type(value).__name__}, which is no JSON value")


class ForkError(BroadwayError):
    """The function failed, or its process died."""


def call_in_fork(do: Callable[[], Any], folder: Path, log: Path, name: str) -> Any:
    """Calls a function in a fork of this process; returns its JSON result.

    :param folder: The working folder of the fork.
    :param log: The file of its output.
    :param name: Its name in the log and in errors.
    :raises ForkError: If the function raises, or the process dies.
    """
    reads, writes = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        _run_child(do, folder, log, name, writes)
    os.close(writes)
    with open(reads, encoding="utf-8") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    if not text:
        raise ForkError(f"the process of {name} died")
    returned, error = json.loads(text)
    if error:
        raise ForkError(error)
    return returned


def _run_child(do: Callable[[], Any], folder: Path, log: Path, name: str, writes: int) -> None:
    try:
        enter_case_folder(folder, log, name)
        try:
            result = [do(), ""]
        except BaseException as error:  # never return into the campaign
            traceback.print_exc()
            result = [None, f"{type(error).__name__}: {error}"]
        with open(writes, "w", encoding="utf-8") as answer:
            json.dump(result, answer)
        sys.stdout.flush()
    finally:
        os._exit(0)
