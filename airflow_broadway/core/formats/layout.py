"""The layout of a run's folder, and the version of its formats.

All files of one run are in one folder, ``<root>/<pipeline>/<dag_id>/<encoded run_id>/``::

    generations/<generation>.json       a generation was opened (before its first receive)
    <generation>/
        messages/<batcher>/*.parquet    messages staged for a batcher
        failed-*.jsonl                  entries of messages that are routed to no batcher
        archive/*.parquet               messages as received, for the archive
        received-*.parquet              messages as received, for the dead-letter table
        manifest.json                   created once, last: it makes the execution valid
        live.json                       progress of a running task, for display
        lease.json                      the lease as last renewed
        in-hand.json                    ids of the messages that a child process is handling
        journal-intent.json             settling has begun (exclusive)
        journal-letters.json            the decision on the dead-letter table's rows (exclusive)
        journal-settled.json            settling is done: its report (exclusive)
    batches/<batcher>/<inputs>/<try>/
        data-*.parquet                  messages in batch order, with a ``batch`` column
        plan.jsonl                      a header line, then a line per batch
    outcomes/<batcher>/<inputs>/
        <batch_id>.json                 a batch's outcome: the first writer wins (exclusive)
        <batch_id>.split                hint: it may be split, and each part has its own outcome
        <batch_id>.<attempt>.prepared   with a sink: the outcome if that attempt's commit lands;
                                        written before the commit if messages failed
        *.entries.jsonl                 entries of its exceptions, referenced by the outcome; few
                                        entries are in the outcome itself
        gathered-*.jsonl                copies of many outcomes, to be read together
    work/<task>-<try>.json              work of a Spark application, until a higher try has a file
    tries/<task>-<try>.json             work of a Python batcher's process, until the same
    work/<task>-<try>.started           it began to handle batches
    work/<task>-<try>.clock             its modification time gives the driver the folder's clock
    {work,tries}/<task>-<try>.ended     it ended without dying of a batch, whatever their outcomes
    begun/{work,tries}/<task>-<try>/<batch_id>   it began that batch; written after a first death
    deaths/{work,tries}/<task>-<try>.json        it died, its parent did not: the batches in hand
    interruptions/{work,tries}/<task>-<try>.json the whole task died with it: the same
    code/<hash>/*                       the launcher and the code for a Spark driver in a pod
    heartbeat.json                      when the ack sensor last checked the run

Tasks and the Spark driver read and write them; the other modules of this package define each.  All
paths in these files are relative to the run's folder.  They are JSON, JSON lines and Parquet:
nothing that a reader executes.  ``version`` is raised when an older reader could misread a file.  A
reader refuses a newer version with an error that names the ``release`` that wrote it; a sweep skips
such a generation.  Unknown fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_broadway.core.errors import StagingDamaged, StagingError
from airflow_broadway.core.formats.sums import check_seal, sealed
from airflow_broadway.core.version import __version__, known_fields

if TYPE_CHECKING:
    from typing import Self

T = TypeVar("T")

#: The version of all formats in this package.
VERSION = 2
#: A folder of the staging root that all pipelines share.  No pipeline's name begins with a dot.
SHARED = ".shared"


def check_version(value: Mapping[str, Any], path: str) -> None:
    """Refuses a file of a newer release.

    :raises StagingError: Naming the file, both versions and the release to use.
    """
    version = value.get("version")
    if not isinstance(version, int) or version > VERSION:
        release = value.get("release")
        wrote = (
            f"airflow-broadway {release}, which wrote it,"
            if isinstance(release, str)
            else "the release of airflow-broadway that wrote it,"
        )
        raise StagingError(
            f"{path} has format version {version!r}; this release reads up to {VERSION}"
            f" ({__version__}): use {wrote} or a newer one"
        )


def read_json(text: str, path: str) -> dict[str, Any]:
    """Parses the JSON object of a versioned file.

    :raises StagingDamaged: If it is corrupt.
    :raises StagingError: If a newer release wrote it; names the file.
    """
    try:
        value: dict[str, Any] = json.loads(text)
        value.get("version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise StagingDamaged(f"{path} is damaged ({error})") from error
    check_version(value, path)
    return value


def load(kind: type[T], text: str, path: str) -> T:
    """Parses a versioned file's JSON into a dataclass; errors as in :func:`read_json`.

    Fields that the dataclass lacks are ignored.  A :class:`SealedFile` must have a valid seal.
    """
    value = read_json(text, path)
    try:
        loaded = kind(**known_fields(kind, value))
    except TypeError as error:
        raise StagingDamaged(f"{path} is damaged ({error})") from error
    if issubclass(kind, SealedFile):
        check_seal(text, path)
    return loaded


class SealedFile:
    """A file whose JSON has a seal; a base of its dataclass."""

    __slots__ = ()

    def dumps(self) -> str:
        """Returns it as JSON on one line, with its seal."""
        return sealed(asdict(self), sort_keys=True)  # type: ignore[call-overload]

    @classmethod
    def loads(cls, text: str, path: str) -> Self:
        """Reads what :meth:`dumps` wrote; errors as in :func:`read_json`."""
        return load(cls, text, path)
