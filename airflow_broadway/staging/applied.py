"""The applied index: messages whose rows a sink has, although the broker redelivers them.

A batch's rows are committed before its messages are acknowledged.  If their lease has lapsed by
then, or the broker refuses, the broker redelivers them.  The settlement therefore writes their ids
below the pipeline's staging folder, before the generation counts as settled::

    _applied/<time>-<generation>.json
        {"version": 1, "messages": [ids], "until": time}

``until`` is when their generation had received them: a message that was sent later has an id that
was used again, as by a topic that was deleted and created again.

A later run acknowledges such a message at once: see :mod:`airflow_broadway.runs.applied`.

Where two copies of a message may have two ids, the ids are digests of its identity.  Two unsettled
generations may hold a copy each.  So a generation *claims* the identities of its messages before it
handles them::

    _applied/claims/<generation>-<n>.json
        {"version": 1, "messages": {id: identity}, "redelivered": [ids]}

The settlement writes the identities of committed messages to the index: those of messages that were
not redelivered, among which a publisher's duplicates are found, to files whose names end with
``-sent.json``, which are kept for a shorter time.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.layout import VERSION, read_json
from airflow_broadway.staging.names import encode_name
from airflow_broadway.staging.store import Folder, Store

log = logging.getLogger(__name__)

#: Retention of the ids: longer than any broker retains a message.
KEPT: Final = timedelta(days=32)

#: Retention of the identities of messages that were not redelivered: a daily run finds duplicates
#: of the run before.
WINDOW: Final = timedelta(hours=26)

#: How far clocks of publishers and brokers may be ahead.
_SKEW: Final = timedelta(minutes=1)

_TIME: Final = "%Y%m%dT%H%M%SZ"
_NAME: Final = re.compile(r"(\d{8}T\d{6}Z)-.+?(-sent)?\.json")


def note_applied(
    store: Store,
    pipeline: str,
    generation: str,
    messages: Collection[str],
    now: datetime,
    until: datetime,
    *,
    sent: bool = False,
) -> None:
    """Adds messages of a generation to the index; idempotent.

    :param messages: Their ids or identities.
    :param until: When all of them had been received.
    :param sent: Whether they are those of messages that were not redelivered.
    :raises StagingError: If the file cannot be written.
    """
    folder = _folder(store, pipeline)
    ending = f"-{generation}{'-sent' if sent else ''}.json"
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
        oldest, sent = (f"{now.astimezone(UTC) - age:{_TIME}}" for age in (KEPT, WINDOW))
        new = []
        for name in self._folder.list(""):
            match = _NAME.fullmatch(name)
            if match is None or name in self._read:
                continue
            if match[1] < (sent if match[2] else oldest):
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


class Claims:
    """The claims of one generation, and those of others; each file is read once."""

    def __init__(self, store: Store, pipeline: str, generation: str) -> None:
        self._folder = _claims_folder(store, pipeline)
        self._generation = generation
        #: The number of files of this generation.
        self.count = 0
        #: By name of a file of another generation.
        self._others: dict[str, AbstractSet[str]] = {}

    def add(self, identities: Mapping[str, str], redelivered: Collection[str]) -> None:
        """Claims identities.

        :param identities: By message id.
        :param redelivered: The ids of redelivered messages.
        :raises StagingError: If the file cannot be written.
        """
        self.count += 1
        self.reduce(identities, redelivered)

    def reduce(self, identities: Mapping[str, str], redelivered: Collection[str]) -> None:
        """Replaces the last claim by some of it; as :meth:`add`."""
        ids = sorted(identities.keys() & redelivered)
        value = {"version": VERSION, "messages": identities, "redelivered": ids}
        self._folder.replace(f"{self._generation}-{self.count}.json", json.dumps(value))

    def of_others(self) -> dict[str, AbstractSet[str]]:
        """Returns the claims of other generations, settled ones included, by generation.

        :raises StagingError: If a file cannot be read.
        """
        names = [n for n in self._folder.list("") if _generation_of(n) != self._generation]
        known = {name: self._others[name] for name in names if name in self._others}
        for name, value in _read_claims(self._folder, [n for n in names if n not in known]):
            known[name] = frozenset(value["messages"].values())
        self._others = known
        claims: dict[str, AbstractSet[str]] = {}
        for name, identities in known.items():
            claims[_generation_of(name)] = claims.get(_generation_of(name), set()) | identities
        return claims

    def remove_except(self, generations: Collection[str]) -> None:
        """Removes the claims of other generations, except those of some."""
        names = [name for name in self._others if _generation_of(name) not in generations]
        self._folder.remove(*names)
        for name in names:
            del self._others[name]


def claims_of(
    store: Store, pipeline: str, generation: str, count: int
) -> tuple[dict[str, str], set[str]]:
    """Returns a generation's claims by message id, and the ids of redelivered messages.

    :param count: The number of its files.
    :raises StagingError: If a file cannot be read.
    """
    identities: dict[str, str] = {}
    redelivered: set[str] = set()
    names = [f"{generation}-{number}.json" for number in range(1, count + 1)]
    for _, value in _read_claims(_claims_folder(store, pipeline), names):
        identities.update(value["messages"])
        redelivered.update(value["redelivered"])
    return identities, redelivered


def _read_claims(folder: Folder, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, text in folder.read_all(names):
        if text is not None:  # otherwise removed by another run since the listing
            yield name, read_json(text, f"{folder.path}/{name}")


def _generation_of(name: str) -> str:
    return name.rpartition("-")[0]


def _claims_folder(store: Store, pipeline: str) -> Folder:
    return store.folder(f"{encode_name(pipeline)}/_applied/claims")


def _folder(store: Store, pipeline: str) -> Folder:
    return store.folder(f"{encode_name(pipeline)}/_applied")
