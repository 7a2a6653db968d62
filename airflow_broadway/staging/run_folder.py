"""The folder of a run and its generations: opened, published, settled.

A *generation* is one execution of a process task.  Its record is written before the first message
is received.  A copy of the record is in ``_open/``, next to the runs of the Dag, until the
generation is settled and its run has a report.  So a sweep finds the generations of dead runs by
listing one small folder, regardless of the number of runs.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import LeaseLapsed, StagingDamaged, StagingError
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.layout import VERSION, check_version, load
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.version import __version__
from airflow_broadway.staging.names import encode_name
from airflow_broadway.staging.store import Folder, Store, host_name

log = logging.getLogger(__name__)

#: The folder, next to the runs of a Dag, of generations that are unsettled or without a report.
#: No run's folder begins with ``_``.
OPEN = "_open"

#: The name of a generation's record, in either place; other files there are ignored.
_RECORD = re.compile(r"([0-9a-f]{32})\.json")

#: The states of a generation: without a manifest; with one; settlement has begun; settled.
OPENED, PUBLISHED, SETTLING, SETTLED = "open", "published", "settling", "settled"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One execution of a process task.

    :param generation: 32 hexadecimal digits.
    :param sequence: Ascending over the executions of one (task, map index) of a run.
    :param lease: The lease when the generation was opened; see :meth:`StagedRun.lease`.
    :param airflow: The name of the run's Airflow deployment; empty outside Airflow.
    :param source: The :class:`RunSource` of its messages, as JSON; empty for the live queue.
    :param state: :data:`OPENED`, :data:`PUBLISHED`, :data:`SETTLING` or :data:`SETTLED`, when the
        record was read.
    """

    generation: str
    pipeline: str
    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    try_number: int
    sequence: int
    lease: dict[str, Any]
    root_id: str
    host: str
    opened_at: str
    airflow: str = ""
    source: dict[str, Any] = field(default_factory=dict)
    state: str = field(default=OPENED, compare=False)
    version: int = VERSION
    release: str = __version__

    @property
    def published(self) -> bool:
        """Whether its manifest is published and its settlement has not begun."""
        return self.state == PUBLISHED

    def dumps(self) -> str:
        """Returns the record as JSON, without its state."""
        value = dataclasses.asdict(self)
        del value["state"]
        if not self.source:  # the live queue is the default
            del value["source"]
        return json.dumps(value, sort_keys=True)

    @classmethod
    def loads(cls, text: str, path: str) -> GenerationRecord:
        """Parses the output of :meth:`dumps`.

        :raises StagingError: If a newer release wrote it, or it is damaged.
        """
        return load(cls, text, path)


def dag_folder(store: Store, pipeline: str, dag_id: str) -> Folder:
    """Returns the folder of all runs of one pipeline in one Dag."""
    return store.folder(f"{encode_name(pipeline)}/{encode_name(dag_id)}")


class StagedRun:
    """The files of one run.

    :param airflow: The name of the calling Airflow deployment; empty outside Airflow.
    """

    def __init__(
        self,
        store: Store,
        *,
        pipeline: str,
        dag_id: str,
        run_id: str,
        clock: Clock | None = None,
        airflow: str = "",
    ) -> None:
        self.store = store
        self.airflow = airflow
        self.pipeline = pipeline
        self.dag_id = dag_id
        self.run_id = run_id
        self.clock: Clock = clock or SystemClock()
        self.dag = dag_folder(store, pipeline, dag_id)
        #: Relative to the root.
        self.path = f"{self.dag.path}/{encode_name(run_id)}"
        self.files = store.folder(self.path)
        #: The texts of files that are never modified, by path.
        self._read: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"StagedRun({self.store.uri!r}, {self.path!r})"

    def spark_uri(self) -> str:
        """Returns the folder's URI for Spark."""
        return self.files.spark_uri()

    # -- generations ---------------------------------------------------------------------------

    def open_generation(
        self,
        *,
        task_id: str,
        map_index: int,
        try_number: int,
        lease: Lease,
        source: Mapping[str, Any] | None = None,
    ) -> GenerationRecord:
        """Records durably that the generation ``lease.generation`` is about to receive.

        :param source: The source as JSON; default: the live queue.

        :raises StagingError: If it cannot be written, the generation was opened before, or another
            Airflow has an unsettled generation in this run's folder.
        """
        records = self._records()
        self._check_airflow(records)
        earlier = [row for row in records if (row.task_id, row.map_index) == (task_id, map_index)]
        record = GenerationRecord(
            generation=lease.generation,
            pipeline=self.pipeline,
            dag_id=self.dag_id,
            run_id=self.run_id,
            task_id=task_id,
            map_index=map_index,
            try_number=try_number,
            sequence=1 + max((row.sequence for row in earlier), default=0),
            lease=lease.to_json(),
            root_id=self.store.root_id(),
            host=host_name(),
            opened_at=self.clock.now().isoformat(),
            airflow=self.airflow,
            source=dict(source or {}),
        )
        text = record.dumps()
        # The copy for sweeps is written first: without it no sweep would ever find the record.
        self.dag.create(f"{OPEN}/{record.generation}.json", text)
        path = paths.generation(record.generation)
        # A client that gets no response retries and finds the file that it wrote itself.
        if not self.files.create(path, text) and self.files.read(path) != text:
            raise StagingError(f"generation {record.generation} was opened before")
        self._read[path] = text
        return record

    def is_foreign(self, record: GenerationRecord) -> bool:
        """Whether another Airflow deployment, which knows its run's state, opened a generation."""
        return record.airflow != self.airflow

    def _check_airflow(self, records: Iterable[GenerationRecord]) -> None:
        for record in records:
            if self.is_foreign(record) and self.state(record.generation) != SETTLED:
                raise StagingError(
                    f"the folder {self.store.uri}/{self.path} has the unsettled generation"
                    f" {record.generation} of another Airflow ({record.airflow!r}, host"
                    f" {record.host!r}; this one is {self.airflow!r}), which has a run with the id"
                    f" {self.run_id!r}, too: set `[broadway] staging` to another folder in one of"
                    " them, or `[broadway] deployment` to the same name if they are one"
                )

    def generations(self, task_ids: Collection[str] | None = None) -> list[GenerationRecord]:
        """Lists all generations of the run, or those of some tasks, oldest first."""
        return [
            dataclasses.replace(record, state=self.state(record.generation))
            for record in self._records()
            if task_ids is None or record.task_id in task_ids
        ]

    def _records(self) -> list[GenerationRecord]:
        """Reads the records of all generations, oldest first, without their states."""
        names = generations_in(self.files.list(paths.GENERATIONS))
        return sorted(map(self._record, names), key=_age)

    def generation(self, generation: str) -> GenerationRecord:
        """Reads one generation.

        :raises StagingError: If it was never opened in this run.
        """
        return dataclasses.replace(self._record(generation), state=self.state(generation))

    def _record(self, generation: str) -> GenerationRecord:
        path = paths.generation(generation)
        try:
            text = self.read_once(path)
        except FileNotFoundError:
            raise StagingError(
                f"run {self.run_id!r} of {self.dag_id!r} has no generation {generation} under"
                f" {self.store.uri}"
            ) from None
        return GenerationRecord.loads(text, path)

    def read_once(self, path: str) -> str:
        """Reads a file that is never modified, or returns its text if it was read before.

        :raises FileNotFoundError: If there is none.
        """
        if path not in self._read:
            self._read[path] = self.files.read(path)
        return self._read[path]

    def create_once(self, path: str, text: str) -> bool:
        """Creates a file that is never modified; returns whether this call wrote it."""
        created = self.files.create(path, text)
        if created:
            self._read[path] = text
        return created

    def state(self, generation: str) -> str:
        """Determines the state of a generation; see :class:`GenerationRecord`."""
        names = set(self.files.list(generation))
        for path, state in (
            (paths.settled(generation), SETTLED),
            (paths.intent(generation), SETTLING),
            (paths.manifest(generation), PUBLISHED),
        ):
            if path.rpartition("/")[2] in names:
                return state
        return OPENED

    # -- manifest and lease --------------------------------------------------------------------

    def manifest(self, generation: str) -> Manifest | None:
        """Reads the manifest of a generation; ``None`` before it is published.

        :raises StagingError: If it was written under another root.
        """
        path = paths.manifest(generation)
        try:
            text = self.read_once(path)
        except FileNotFoundError:
            return None
        manifest = Manifest.loads(text, path)
        self.store.check_root(manifest.root_id, manifest.host)
        return manifest

    def publish(self, manifest: Manifest) -> bool:
        """Writes the manifest, without which the files of the generation do not count.

        Settlement may begin between the check and the write: the manifest then exists together with
        the intent, and no task uses it.

        :returns: Whether this call wrote it; otherwise an earlier one did.
        :raises LeaseLapsed: If its messages were released in the meantime.
        """
        if self.files.exists(paths.intent(manifest.generation)):
            raise LeaseLapsed(
                f"generation {manifest.generation} was settled before it was complete: a newer"
                " execution of its task, or a sweep, released its messages"
            )
        return self.create_once(paths.manifest(manifest.generation), manifest.dumps())

    def lease(self, generation: str | GenerationRecord) -> Lease:
        """Reads the lease as last renewed, or else the one in the record.

        :param generation: Its name, or its record to save a read.
        """
        record = generation if isinstance(generation, GenerationRecord) else None
        name = record.generation if record is not None else str(generation)
        try:
            text = self.files.read(paths.lease(name))
        except FileNotFoundError:
            return Lease.from_json((record or self.generation(name)).lease)
        try:
            value = json.loads(text)
            check_version({"version": VERSION, **value}, paths.lease(name))
            return Lease.from_json(value)
        except (ValueError, KeyError, TypeError) as error:
            raise StagingDamaged(f"{paths.lease(name)} is damaged ({error!r})") from error

    def put_lease(self, lease: Lease) -> None:
        """Records a renewed lease."""
        value = {**lease.to_json(), "version": VERSION, "release": __version__}
        self.files.replace(paths.lease(lease.generation), json.dumps(value))

    def forget(self, generations: Collection[str], others: Iterable[str] = ()) -> None:
        """Removes the files of settled generations without messages.

        Call :meth:`forget_open` afterwards: if the process dies before, a sweep removes the rest.

        :param others: Other files of the run to remove.
        """
        self.files.remove(*map(paths.generation, generations), *others)
        for generation in generations:
            self.store.folder(f"{self.path}/{generation}").remove_all()
        self._read.clear()

    def forget_open(self, *generations: str) -> None:
        """Removes generations with a settlement and a report from the list of open ones.

        If that fails they stay on the list, and sweeps write the report of their run again.
        """
        try:
            self.dag.remove(*(f"{OPEN}/{generation}.json" for generation in generations))
        except StagingError as error:
            names = ", ".join(generations)
            log.warning("generations %s are complete but stay on the list: %s", names, error)


def generations_in(names: Iterable[str]) -> list[str]:
    """Extracts the generations from file names of records; skips other names."""
    return [match[1] for match in map(_RECORD.fullmatch, names) if match]


def _age(record: GenerationRecord) -> tuple[Any, ...]:
    order = (record.sequence, record.try_number, record.opened_at, record.generation)
    return (record.task_id, record.map_index, *order)


def iter_open(
    store: Store, pipeline: str, dag_id: str | None
) -> Iterator[tuple[StagedRun, GenerationRecord]]:
    """Yields the generations of a Dag that are unsettled or without a report, oldest first.

    Costs one listing regardless of the number of runs, and a read and a listing per generation.

    :param dag_id: ``None`` for all Dags of the pipeline, at one listing per Dag.
    """
    pairs: list[tuple[StagedRun, GenerationRecord]] = []
    for folder in _dag_folders(store, pipeline, dag_id):
        pairs += _open_in(folder, pipeline)
    yield from sorted(pairs, key=lambda pair: (pair[1].opened_at, pair[1].generation))


def _dag_folders(store: Store, pipeline: str, dag_id: str | None) -> list[Folder]:
    if dag_id is not None:
        return [dag_folder(store, pipeline, dag_id)]
    folder = store.folder(encode_name(pipeline))
    names = [name for name in folder.list("") if name[0] not in "._"]
    return [store.folder(f"{folder.path}/{name}") for name in names]


def _open_in(folder: Folder, pipeline: str) -> Iterator[tuple[StagedRun, GenerationRecord]]:
    for name in generations_in(folder.list(OPEN)):
        path = f"{OPEN}/{name}.json"
        try:
            record = GenerationRecord.loads(folder.read(path), path)
        except FileNotFoundError:  # removed since the listing
            continue
        except StagingError as error:
            # It must not block the others or a run: its lease lapses by itself.
            log.error("an unsettled generation is skipped: %s", error)
            continue
        dag_id, run_id = record.dag_id, record.run_id
        run = StagedRun(folder.store, pipeline=pipeline, dag_id=dag_id, run_id=run_id)
        yield run, dataclasses.replace(record, state=run.state(record.generation))


def iter_unsettled(
    store: Store, pipeline: str, dag_id: str | None
) -> Iterator[tuple[StagedRun, GenerationRecord]]:
    """Yields the generations of :func:`iter_open` that are not settled."""
    for run, record in iter_open(store, pipeline, dag_id):
        if record.state != SETTLED:
            yield run, record
