"""Where a run's files lie, and which version their formats have.

Everything of one run lies under one folder, ``<root>/<pipeline>/<dag_id>/<encoded run_id>/``::

    generations/<generation>.json       a generation was opened (before its first receive)
    <generation>/
        messages/<batcher>/*.parquet    messages that wait for a batcher
        failed-*.jsonl                  entries of messages that no batcher gets
        archive/*.parquet               what was received, for the archive
        manifest.json                   written once, exclusively: only now is the execution real
        live.json                       how far its task was a moment ago, for people
        lease.json                      the lease as last renewed
        in-hand.json                    ids of the messages that a child process is handling
        journal-intent.json             settling has begun (exclusive)
        journal-settled.json            settling is done: the report (exclusive)
    batches/<batcher>/<inputs>/<try>/
        data-*.parquet                  messages in batch order, with a ``batch`` column
        plan.jsonl                      a header line, then a line per batch
    outcomes/<batcher>/<inputs>/
        <batch_id>.json                 what became of a batch: the first writer wins (exclusive)
        <batch_id>.split                that may be: it was split, and each part has its own
        *.entries.jsonl                 entries of its exceptions, named by the outcome; where they
                                        are few, they are in the outcome itself
        gathered-*.jsonl                copies of many outcomes, to be read at once
    work/<task>-<try>.json              what a Spark application does, until a higher try has one
    tries/<task>-<try>.json             a task runs a Python batcher's batches, until the same
    work/<task>-<try>.started           it began to handle batches
    work/<task>-<try>.clock             its modification time tells the driver the folder's clock
    {work,tries}/<task>-<try>.ended     it ended, however its batches fared: it did not die of one
    begun/{work,tries}/<task>-<try>/<batch_id>   it began that batch; written once something died
    deaths/{work,tries}/<task>-<try>.json        it died, its parent did not: the batches in hand
    interruptions/{work,tries}/<task>-<try>.json the whole task died with it: the same
    heartbeat.json                      when the ack sensor last looked

Tasks and the Spark driver read and write them; the other modules of this room say what is in each.
All paths in these files are relative to the run's folder.  They are JSON, JSON lines and Parquet:
nothing that a reader executes.  ``version`` is raised when an old reader could misread a file; a
reader that meets a newer one refuses it with one clear error that names the ``release`` which wrote
it; a sweep leaves such a generation alone.  Fields that a reader does not know it ignores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from airflow_broadway.core.errors import StagingDamaged, StagingError
from airflow_broadway.core.formats.sums import check_seal
from airflow_broadway.core.version import __version__, known_fields

T = TypeVar("T")

#: The version of all formats here.
VERSION = 2
#: The folder of the staging root that all pipelines share.  No pipeline's name begins with a dot.
SHARED = ".shared"


class paths:  # noqa: N801 - a namespace
    """Where each file lies in the run's folder."""

    HEARTBEAT = "heartbeat.json"
    GENERATIONS = "generations"

    @staticmethod
    def generation(generation: str) -> str:
        return f"generations/{generation}.json"

    @staticmethod
    def manifest(generation: str) -> str:
        return f"{generation}/manifest.json"

    @staticmethod
    def lease(generation: str) -> str:
        return f"{generation}/lease.json"

    @staticmethod
    def live(generation: str) -> str:
        return f"{generation}/live.json"

    @staticmethod
    def in_hand(generation: str) -> str:
        return f"{generation}/in-hand.json"

    @staticmethod
    def intent(generation: str) -> str:
        return f"{generation}/journal-intent.json"

    @staticmethod
    def settled(generation: str) -> str:
        return f"{generation}/journal-settled.json"

    @staticmethod
    def outcomes(plan: str) -> str:
        """The folder of a plan's outcomes, and of a later plan's of the same generations.

        Plans of other generations have another: messages that were received anew may come in the
        same batches, under the same ids, and are to be handled all the same.
        """
        _, _, place = plan.rpartition("/")[0].partition("/")
        return f"outcomes/{place}"

    @staticmethod
    def outcome(plan: str, batch_id: str) -> str:
        return f"{paths.outcomes(plan)}/{batch_id}.json"

    @staticmethod
    def split(plan: str, batch_id: str) -> str:
        return f"{paths.outcomes(plan)}/{batch_id}.split"

    @staticmethod
    def outcome_entries(plan: str, batch_id: str, writer: str) -> str:
        return f"{paths.outcomes(plan)}/{batch_id}.{writer}.entries.jsonl"

    @staticmethod
    def gathered(plan: str, writer: str, number: int) -> str:
        return f"{paths.outcomes(plan)}/gathered-{writer}-{number:04d}.jsonl"

    @staticmethod
    def is_gathered(name: str) -> bool:
        """Whether a name in the folder of outcomes is one of :meth:`gathered`."""
        return name.startswith("gathered-") and name.endswith(".jsonl")

    @staticmethod
    def work(name: str, try_number: int) -> str:
        return paths.of_try(name, try_number)

    @staticmethod
    def started(name: str, number: int, folder: str) -> str:
        return f"{folder}/{name}-{number:06d}.started"

    @staticmethod
    def clock(name: str, number: int) -> str:
        return f"work/{name}-{number:06d}.clock"

    @staticmethod
    def ended(name: str, number: int, folder: str) -> str:
        return f"{folder}/{name}-{number:06d}.ended"

    @staticmethod
    def begun(name: str, number: int, folder: str) -> str:
        return f"begun/{folder}/{name}-{number:06d}"

    @staticmethod
    def death(name: str, number: int, folder: str) -> str:
        return f"deaths/{folder}/{name}-{number:06d}.json"

    @staticmethod
    def interruption(name: str, number: int, folder: str) -> str:
        return f"interruptions/{folder}/{name}-{number:06d}.json"

    @staticmethod
    def budget(name: str, cleared: int, folder: str) -> str:
        return f"{paths.budgets(folder)}/{name}-{cleared:06d}.json"

    @staticmethod
    def budgets(folder: str) -> str:
        return f"budgets/{folder}"

    @staticmethod
    def of_try(name: str, number: int, folder: str = "work") -> str:
        """A try of a task: a Spark application's in ``work``, a Python batcher's in ``tries``."""
        return f"{folder}/{name}-{number:06d}.json"


def check_version(value: Mapping[str, Any], path: str) -> None:
    """Refuse a file that a newer release wrote.

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
    """The JSON object of a versioned file.

    :raises StagingDamaged: If it is not as it was written.
    :raises StagingError: If a newer release wrote it; names the file.
    """
    try:
        value: dict[str, Any] = json.loads(text)
        value.get("version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise StagingDamaged(f"{path} is damaged ({error})") from error
    check_version(value, path)
    if value.pop("seal", None):
        check_seal(text, path)
    return value


def load(kind: type[T], text: str, path: str) -> T:
    """A dataclass of a versioned file, of its JSON object; errors as of :func:`read_json`.

    Fields that the dataclass lacks are ignored.
    """
    value = read_json(text, path)
    try:
        return kind(**known_fields(kind, value))
    except TypeError as error:
        raise StagingDamaged(f"{path} is damaged ({error})") from error
