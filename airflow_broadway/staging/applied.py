"""The applied index: messages whose rows a sink has, although the broker redelivers them.

A batch's rows are committed before its messages are acknowledged.  If their lease has lapsed by
then, or the broker refuses, the broker redelivers them.  The settlement therefore writes their ids
below the pipeline's staging folder, before the generation counts as settled::

    _applied/<time>-<generation>.json
        {"version": 1, "messages": [ids], "until": time}

``until`` is when their generation had received them: a message that was sent later has an id that
was used again, as by a topic that was deleted and created again.

A later run acknowledges such a message at once: see :mod:`airflow_broadway.runs.applied`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.layout import VERSION, read_json
from airflow_broadway.staging.names import encode_name
from airflow_broadway.staging.store import Folder, Store

log = logging.getLogger(__name__)

#: Retention of the ids: longer than any broker retains a message.
KEPT: Final = timedelta(days=32)

#: How far clocks of publishers and brokers may be ahead.
_SKEW: Final = timedelta(minutes=1)

_TIME: Final = "%Y%m%dT%H%M%SZ"
_NAME: Final = re.compile(r"(\d{8}T\d{6}Z)-.+\.json")


def note_applied(
    store: Store,
    pipeline: str,
    generation: str,
    messages: Collection[str],
    now: datetime,
    until: datetime,
) -> None:
    """Adds messages of a generation to the index; idempotent.

    :param messages: Their ids.
    :param until: When all of them had been received.
    :raises StagingError: If the file cannot be written.
    """
    folder = _folder(store, pipeline)
    ending = f"-{generation}.json"
    if not any(name.endswith(ending) for name in folder.list("")):
        value = {"version": VERSION, "messages": sorted(messages), "until": until.isoformat()}
        folder.create(f"{now.astimezone(UTC):{_TIME}}{ending}", json.dumps(value))


class AppliedIndex:
    """The index of one pipeline; each file is read once."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self._folder = _folder(store, pipeline)
        #: By message id: when it had been received.
        self._messages: dict[str, datetime] = {}
        self._read: set[str] = set()

    def has(self, message_id: str, sent_at: datetime | None = None) -> bool:
        """Returns whether a sink has the rows of a message.

        :param sent_at: When its broker enqueued it, if known.
        """
        until = self._messages.get(message_id)
        return until is not None and (sent_at is None or sent_at <= until + _SKEW)

    def read_new(self, now: datetime) -> None:
        """Reads the files that were written since the last call, and removes old ones.

        :raises StagingError: If a file cannot be read.
        """
        oldest = f"{now.astimezone(UTC) - KEPT:{_TIME}}"
        new = []
        for name in self._folder.list(""):
            match = _NAME.fullmatch(name)
            if match is None or name in self._read:
                continue
            if match[1] < oldest:
                self._remove(name)
            else:
                new.append(name)
        for name, text in self._folder.read_all(new):
            if text is not None:  # otherwise removed by another run since the listing
                value: dict[str, Any] = read_json(text, f"{self._folder.path}/{name}")
                until = datetime.fromisoformat(value["until"])
                for message_id in value["messages"]:
                    self._messages[message_id] = max(until, self._messages.get(message_id, until))
            self._read.add(name)

    def _remove(self, name: str) -> None:
        try:
            self._folder.remove(name)
        except StagingError as error:
            log.warning("Could not remove the old file %s of the applied index: %s", name, error)


def _folder(store: Store, pipeline: str) -> Folder:
    return store.folder(f"{encode_name(pipeline)}/_applied")
