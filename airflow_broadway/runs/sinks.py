"""The sinks of a run's batchers: commits of Python batchers, and batches in doubt.

Before the messages of a generation may be redelivered, its batches in doubt are *resolved*: those
whose commit has landed get their outcome, and the commits of the others are ruled out.  So a paused
process that wakes up later cannot commit rows of messages that were redelivered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import ConversionError, LeaseLapsed, PipelineError
from airflow_broadway.core.formats.commits import (
    commit_id,
    commit_ids,
    commit_rows,
    deletion_id,
    land,
    record_landed,
)
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.core.model.connections import Connections
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.run_source import Interval, RunSource
from airflow_broadway.core.model.sink import Commit, Sink, SinkClient, SinkEnv, SinkError
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.schema.ddl import parse_schema
from airflow_broadway.core.stages.batch_processor import CommitRows
from airflow_broadway.core.text import pluralize
from airflow_broadway.runs.plans import OpenPlans
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun, iter_unsettled
from airflow_broadway.staging.store import host_name

log = logging.getLogger(__name__)


def open_sink(pipeline: Pipeline, batcher: str, connections: Connections) -> SinkClient:
    """Opens the sink of a batcher in this process.

    :raises SinkError: If it cannot be reached or read.
    :raises ConnectionMissing: If an Airflow connection that it names is not defined.
    """
    sink = pipeline.batchers[batcher].sink
    if sink is None:
        raise LookupError(f"the batcher {batcher!r} has no sink")
    client: SinkClient = sink.open(SinkEnv(connections=connections))
    return client


class Commits:
    """Commits the rows of one Python batcher; used from one thread.

    Connects at the first commit.
    """

    def __init__(self, pipeline: Pipeline, batcher: str, connections: Connections) -> None:
        self._pipeline = pipeline
        self._batcher = batcher
        self._connections = connections
        self._client: SinkClient | None = None

    def commit(self, rows: Any, commit: Commit) -> None:
        """Commits rows; errors as in :func:`commit_rows`.

        :param rows: A list of dicts, or a ``pyarrow.Table``.
        :raises ConversionError: If a value does not fit the batcher's ``schema``.
        """
        if isinstance(rows, list):
            rows = table_of_rows(rows, self._pipeline.batchers[self._batcher].schema)
        commit_rows(self._open(), rows, commit)

    def rule_out(self, commit_ids: list[str]) -> Mapping[str, int]:
        """Rules commits out; see :meth:`SinkClient.rule_out`."""
        return self._open().rule_out(commit_ids)

    def _open(self) -> SinkClient:
        if self._client is None:
            self._client = open_sink(self._pipeline, self._batcher, self._connections)
        return self._client

    def close(self) -> None:
        """Releases the connection; idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class LocalCommits:
    """Commits the rows of a run in one process, whose messages are not staged.

    :param generation: The run's generation, a part of its commits' ids.
    """

    def __init__(self, pipeline: Pipeline, generation: str, connections: Connections) -> None:
        self._pipeline = pipeline
        self._generation = generation
        self._connections = connections
        self._opened: list[Commits] = []

    def commit_of(self, batcher: str) -> CommitRows:
        """Returns the commit function of one batch processor."""
        commits = Commits(self._pipeline, batcher, self._connections)
        self._opened.append(commits)

        def commit(
            rows: Any, info: BatchInfo, successful: list[Message], failed: list[Message]
        ) -> None:
            key = commit_id(info.batch_id, [self._generation])
            commits.commit(
                rows, Commit(commit_id=key, attempt=1, batch=info, pipeline=self._pipeline.name)
            )

        return commit

    def close(self) -> None:
        """Releases connections; idempotent."""
        for commits in self._opened:
            commits.close()


def table_of_rows(rows: Sequence[Any], schema: str | None) -> Any:
    """Returns rows as a ``pyarrow.Table``.

    Columns that the schema has too get its types; the types of others follow from their values.

    :param schema: The batcher's DDL.
    :raises ConversionError: If a value does not fit its type.
    """
    import pyarrow as pa

    from airflow_broadway.staging.arrow_schema import arrow_struct

    types = {} if schema is None else {f.name: f.type for f in arrow_struct(parse_schema(schema))}
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        try:
            columns[name] = pa.array([row.get(name) for row in rows], type=types.get(name))
        except (pa.ArrowException, TypeError, ValueError) as error:
            kind = f" (in the schema: {types[name]})" if name in types else ""
            raise ConversionError(
                f"the column {name!r}{kind} of the rows that handle_batch returned: {error}"
            ) from error
    return pa.table(columns)


# -- backfills -------------------------------------------------------------------------------------


def time_sinks(pipeline: Pipeline) -> list[Sink]:
    """Returns the sinks that have a time column, each table once.

    :raises PipelineError: If batchers with one table have different time columns.
    """
    tables: dict[str, Sink] = {}
    for options in pipeline.batchers.values():
        if options.sink is not None:
            other = tables.setdefault(options.sink.uri, options.sink)
            if other.time_column != options.sink.time_column:
                raise PipelineError(
                    f"batchers with the sink {other.uri} have different time_columns,"
                    f" {other.time_column!r} and {options.sink.time_column!r}: give all of them the"
                    " same"
                )
    return [sink for sink in tables.values() if sink.time_column]


def claim_interval(
    run: StagedRun, pipeline: Pipeline, record: GenerationRecord, is_over: Callable[[str], bool]
) -> None:
    """Checks that no other execution is replacing or adding rows of an interval.

    The record of a generation is its claim, until it is settled: of two that are opened at the same
    time, at least one reads the record of the other.  A process that was paused before it opened
    its generation, and whose try or run has ended, stops here; one that is paused later is refused
    by the tables.

    :param record: The generation that was opened to handle a past interval, or a past run.
    :param is_over: See :class:`airflow_broadway.runs.ports.Ports`.
    :raises SinkError: If another one is not settled yet; a retry may succeed.
    :raises LeaseLapsed: If a later try of this task has begun, or its run is over.
    """
    source = RunSource.from_json(record.source)
    sinks = time_sinks(pipeline) if source.is_whole else []
    if not sinks:
        return
    tries = [
        other.try_number
        for other in run.generations([record.task_id])
        if other.map_index == record.map_index
    ]
    if max(tries) > record.try_number or is_over(record.run_id):
        raise LeaseLapsed(
            f"try {record.try_number} of {record.task_id!r} begins after its run, or a later try of"
            " it, has ended: it would delete rows that nothing writes again"
        )
    task = (record.dag_id, record.run_id, record.task_id, record.map_index)
    for _, other in iter_unsettled(run.store, run.pipeline, None):
        holder = (other.dag_id, other.run_id, other.task_id, other.map_index)
        if other.generation == record.generation or (holder[:2] == task[:2] and holder != task):
            continue  # the other process tasks of this run receive nothing
        if source.rewrites_rows_of(RunSource.from_json(other.source)):
            raise SinkError(
                f"run {other.run_id!r} of the Dag {other.dag_id!r} (try {other.try_number}) writes"
                f" rows of the same time to {sinks[0].uri} and is not settled yet: nothing was"
                " handled; retry once it has ended, or clear its `ack` task if it has died"
            )


def delete_interval(pipeline: Pipeline, env: ProducerEnv, interval: Interval) -> None:
    """Deletes the rows of an interval in sinks with a time column, once per generation.

    The settlement of a generation rules its deletion out: a paused process that wakes up later
    would delete what others have committed.

    :param env: The generation that begins.
    :raises SinkError: If a table cannot be reached.
    """
    key = deletion_id(env.generation)
    commit = Commit(commit_id=key, attempt=1, batch=None, pipeline=pipeline.name)
    for sink in time_sinks(pipeline):
        log.info("Deleting the rows of %s from %s.", sink.uri, interval)
        with closing(sink.open(SinkEnv(connections=env.connections))) as client:
            land(client, commit, partial(client.delete, interval, commit))


def deletes_rows(pipeline: Pipeline, record: GenerationRecord) -> bool:
    """Whether a generation may delete the rows of an interval."""
    return RunSource.from_json(record.source).interval is not None and bool(time_sinks(pipeline))


def rule_out_deletion(
    pipeline: Pipeline, record: GenerationRecord, connections: Connections
) -> None:
    """Rules out the deletion of a generation that is about to be settled.

    :raises SinkError: If a table cannot be reached.
    """
    for sink in time_sinks(pipeline) if deletes_rows(pipeline, record) else ():
        with closing(sink.open(SinkEnv(connections=connections))) as client:
            client.rule_out([deletion_id(record.generation)])


# -- batches in doubt ------------------------------------------------------------------------------


def sink_batchers(pipeline: Pipeline) -> list[str]:
    """Returns the batchers of a pipeline that have a sink."""
    return [name for name, options in pipeline.batchers.items() if options.sink is not None]


def record_landed_batches(
    run: StagedRun, pipeline: Pipeline, plans: OpenPlans, connections: Connections
) -> None:
    """Records the outcomes of open batches whose commits have landed.

    Called when an earlier process of the task began batches.

    :raises SinkError: If a sink cannot be read, or is another than when they were planned.
    """
    for head in plans.open_heads:
        head.check_sink(pipeline.batchers[head.batcher].commits_uri)
        if head.sink is None:
            continue
        batches = [batch for plan, batch in plans.open_batches() if plan is head]
        ids = commit_ids(head, batches)
        with closing(open_sink(pipeline, head.batcher, connections)) as client:
            landed = client.landed(list(ids))
        if landed:
            record_landed(run.files, head, ids, landed, by=host_name())
            plans.look()


def resolve(
    run: StagedRun,
    pipeline: Pipeline,
    generation: str,
    connections: Connections,
    batchers: Collection[str] | None = None,
    *,
    recorded: Recorded,
) -> None:
    """Resolves the batches in doubt that hold messages of a generation.

    :param batchers: The batchers with a sink; default: all of the pipeline.
    :raises SinkError: If a sink cannot be reached, or is another than when the batches were
        planned: the generation cannot be settled yet.
    """
    for batcher in sink_batchers(pipeline) if batchers is None else batchers:
        plans = [p for p in recorded.plans(batcher) if p.sink and generation in p.generations]
        in_doubt = [(plan, _undecided(recorded, plan, generation)) for plan in plans]
        ids = [key for plan, batches in in_doubt for key in commit_ids(plan, batches)]
        if not ids:
            continue
        for plan, batches in in_doubt:
            if batches:
                plan.check_sink(pipeline.batchers[batcher].commits_uri)
        count = pluralize(len(ids), "batch")
        log.info("%s of %r without an outcome: ruling them out.", count, batcher)
        with closing(open_sink(pipeline, batcher, connections)) as client:
            landed = client.rule_out(list(dict.fromkeys(ids)))
        for plan, batches in in_doubt:
            record_landed(run.files, plan, commit_ids(plan, batches), landed, by=host_name())
        if landed:
            recorded.forget_outcomes()


def rule_out_batches(
    run: StagedRun,
    pipeline: Pipeline,
    heads: Mapping[str, BatchPlan],
    batches: Iterable[PlannedBatch],
    connections: Connections,
) -> None:
    """Rules out the commits of batches that are about to be split or dead-lettered.

    Batches whose commit has landed have an outcome afterwards.

    :param heads: The plans, by batch id.
    :raises SinkError: If a sink cannot be reached.
    """
    for batch in batches:
        head = heads[batch.batch_id]
        head.check_sink(pipeline.batchers[head.batcher].commits_uri)
        if head.sink is None:
            continue
        ids = commit_ids(head, [batch])
        with closing(open_sink(pipeline, head.batcher, connections)) as client:
            attempts = client.rule_out(list(ids))
        record_landed(run.files, head, ids, attempts, by=host_name())


def _undecided(recorded: Recorded, plan: BatchPlan, generation: str) -> Iterable[PlannedBatch]:
    ids = recorded.ids(plan)
    return [
        batch
        for batch in recorded.batches(plan)
        if batch.sources.get(generation) and batch.batch_id not in ids
    ]
