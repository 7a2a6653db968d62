"""Records the generations whose task died, and the messages that were in hand at that time.

The death of a whole task proves nothing about its messages: a preemption and the kernel's OOM
killer cannot be distinguished.  While there is a record, a redelivered message is a *suspect* and
is handled in a child process.  Below the pipeline's staging folder::

    _crashes/<time>-<generation>-<count>.json
        {"version": 1, "in_hand": [message ids], "alone": [those with nothing else in hand]}
    _crashes/<time>-<name>-forgotten.json
        {"version": 1, "messages": [ids of messages whose earlier crashes do not count any more]}

``count`` is the number of ids, so that a listing suffices to choose the files to read.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.layout import VERSION, read_json
from airflow_broadway.staging.names import encode_name
from airflow_broadway.staging.store import Folder, Store

log = logging.getLogger(__name__)

#: Retention of a record: the maximum retention of a message in SQS.
KEPT: Final = timedelta(days=14)
#: Number of crashes in which a message was in hand → maximum size of its portion; above, it is
#: handled alone.
_PORTIONS: Final = {1: 25, 2: 5}

_TIME: Final = "%Y%m%dT%H%M%SZ"
_NAME: Final = re.compile(r"(\d{8}T\d{6}Z)-(.+)-(\d+|forgotten)\.json")


@dataclass(frozen=True)
class CrashHistory:
    """The crashes on record of one pipeline.

    :param crashes: The number of generations whose task died.
    :param in_hand: Message id → the number of crashes in which it was in hand.
    :param alone: Message id → the number of crashes in which nothing else was in hand.
    """

    crashes: int = 0
    in_hand: Mapping[str, int] = field(default_factory=dict)
    alone: Mapping[str, int] = field(default_factory=dict)


def portion_size(in_hand: int) -> int | None:
    """Returns the maximum number of messages handled together with a suspect.

    :param in_hand: The number of crashes in which the message was in hand.
    :returns: ``None`` for no bound.
    """
    return None if in_hand < 1 else _PORTIONS.get(in_hand, 1)


def record_crash(
    store: Store,
    pipeline: str,
    generation: str,
    in_hand: Collection[str],
    now: datetime,
    *,
    alone: Collection[str] | None = None,
) -> None:
    """Records that a generation's task died; idempotent.

    :param in_hand: Ids of the messages that a child process was handling; empty if none was.
    :param alone: Those that were in hand with nothing else; by default the only one.
    :raises StagingError: If the record cannot be written.
    """
    if alone is None:
        alone = in_hand if len(in_hand) == 1 else ()
    folder = store.folder(_folder(pipeline))
    ending = f"-{generation}-{len(in_hand)}.json"
    # A settlement is retried while its broker cannot be reached.
    if any(name.endswith(ending) for name in folder.list("")):
        return
    name = f"{now.astimezone(UTC):{_TIME}}{ending}"
    value = {"version": VERSION, "in_hand": sorted(in_hand), "alone": sorted(alone)}
    folder.create(name, json.dumps(value))


def forget_crashes(
    store: Store, pipeline: str, name: str, messages: Collection[str], now: datetime
) -> None:
    """Clears the crash records of dead-lettered messages, so that a requeued one starts afresh.

    :param name: The name of the generation or batch.
    :param messages: Their ids.
    :raises StagingError: If the file cannot be written.
    """
    value = {"version": VERSION, "messages": sorted(messages)}
    store.folder(_folder(pipeline)).create(
        f"{now.astimezone(UTC):{_TIME}}-{name}-forgotten.json", json.dumps(value)
    )


def load_crash_history(store: Store, pipeline: str, now: datetime) -> CrashHistory:
    """Loads the crashes on record, and removes records older than :data:`KEPT`.

    :raises StagingError: If the records cannot be read.
    """
    folder = store.folder(_folder(pipeline))
    oldest = f"{now.astimezone(UTC) - KEPT:{_TIME}}"
    newest: dict[str, tuple[int, str]] = {}
    forgotten: list[str] = []
    for name in folder.list(""):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        if match[1] < oldest:
            _remove(store, pipeline, name)
        elif match[3] == "forgotten":
            forgotten.append(name)
        else:
            # An interrupted settlement may have recorded a crash twice.
            record = int(match[3]), name
            newest[match[2]] = max(newest.get(match[2], (-1, "")), record)
    records = [name for count, name in newest.values() if count]
    forgotten_at: dict[str, str] = {}
    if records:
        for name, value in _read(folder, sorted(forgotten)):
            forgotten_at.update(dict.fromkeys(value["messages"], _time_of(name)))
    in_hand: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for name, value in _read(folder, records):
        for counter, ids in ((in_hand, value["in_hand"]), (alone, value["alone"])):
            counter.update(key for key in ids if _time_of(name) > forgotten_at.get(key, ""))
    return CrashHistory(len(newest), in_hand, alone)


def _read(folder: Folder, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads records; skips an unreadable one, which still counts as a crash."""
    for name, text in folder.read_all(names):
        if text is None:  # removed by another run since the listing
            continue
        try:
            value = read_json(text, f"{folder.path}/{name}")
        except StagingError as error:
            log.warning("A crash record cannot be read: %s", error)
        else:
            yield name, {"in_hand": (), "alone": (), "messages": (), **value}


def _time_of(name: str) -> str:
    return name.partition("-")[0]


def _folder(pipeline: str) -> str:
    return f"{encode_name(pipeline)}/_crashes"


def _remove(store: Store, pipeline: str, name: str) -> None:
    try:
        store.folder(_folder(pipeline)).remove(name)
    except StagingError as error:  # an old record only prolongs isolation
        log.warning("Could not remove the old crash record %s: %s", name, error)
