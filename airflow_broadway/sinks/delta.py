"""The sink for a Delta Lake table.

A commit carries its id as a transaction identifier (``txnAppId``), and so does a tombstone.  A
writer reads the identifier and commits with the same handle: Delta Lake refuses a commit whose
identifier another commit has recorded since.  The table's history tells whose commit it was.

On Spark, Delta Lake itself reads the identifier, and skips a write silently if the version is not
greater than the recorded one.  So a tombstone from Spark has the version of a commit: with a
greater one it would follow a commit that has landed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from airflow_broadway.core.masking import reason_of
from airflow_broadway.core.model.options import Options, is_template, option, options
from airflow_broadway.core.model.rules import CONN_ID, TEXT, matching, one_of
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.core.model.sink import (
    Commit,
    CommitInDoubt,
    Sink,
    SinkClient,
    SinkEnv,
    SinkError,
)
from airflow_broadway.sinks.fencing import (
    KEPT_DAYS,
    RULED_OUT,
    TIME_COLUMN,
    check_time_column,
    has_landed,
    import_client,
    spark_reason,
)

#: The versions of a transaction identifier; that of a tombstone by Spark is a commit's.
_COMMITTED, _TOMBSTONE = 1, 2
#: Commits that are read from the history first, before all of it.
_NEWEST = 200


@options
class DeltaTable(Options, Sink):
    """A Delta Lake table; see ``docs/sink-tables.md``."""

    path: str = option(
        rule=matching(
            r"(?!\w+://[^/]*:[^/]*@)(/|[a-z][a-z0-9]*://)[^?#`]+",
            "an absolute path or a URI without a password",
        ),
        doc="The table's folder, such as ``s3://lake/orders``; the table must exist.",
    )
    conn_id: str | None = option(
        default=None,
        rule=CONN_ID.or_none(),
        doc="The connection whose extra has delta-rs's ``storage_options``.  Spark takes its"
        " own settings.",
    )
    schema_mode: str = option(
        default="strict",
        rule=one_of("strict", "merge"),
        doc="New columns: ``merge`` adds them to the table, ``strict`` refuses them.",
    )

    time_column: str | None = option(default=None, rule=TEXT.or_none(), doc=TIME_COLUMN)

    @property
    def uri(self) -> str:
        path = self.path.rstrip("/")
        return path if "://" in path else f"file://{path}"

    def caveat(self, engine: str) -> str:
        if engine != "spark" or "://" in self.path or is_template(self.path):
            return ""
        return (
            "on a local or mounted disk, Spark creates an entry of Delta Lake's log by a look and a"
            " rename: a driver that is paused in between could commit after it was ruled out; use"
            " another store, or engine='python'"
        )

    @property
    def connection_ids(self) -> tuple[str, ...]:
        return () if self.conn_id is None else (self.conn_id,)

    def open(self, env: SinkEnv) -> SinkClient:
        storage: dict[str, str] = {}
        if self.conn_id is not None:
            extra = env.connections.get(self.conn_id).extra
            storage = {name: str(v) for name, v in extra.get("storage_options", {}).items()}
        client = _Client(self, storage)
        table = client.load()
        _check_retention(table.metadata().configuration, self.uri)
        if self.time_column is not None:
            kinds = {field.name: str(field.type.type) for field in table.schema().fields}
            check_time_column(self.uri, self.time_column, kinds.get(self.time_column))
        return client

    def open_spark(self, spark: Any, env: SinkEnv) -> SinkClient:
        if self.uri.startswith("s3"):
            raise SinkError(
                f"{self.uri}: Delta Lake on Spark and the settlement have no common lock in S3, so"
                " that commits could not be ruled out; use a Python batcher"
            )
        client = _SparkClient(self, spark)
        _check_retention(client.properties(), self.uri)
        return client


def _check_retention(properties: Mapping[str, str], uri: str) -> None:
    """Refuses a table that forgets transaction identifiers.

    :raises SinkError: If its retention is too short.
    """
    retention = properties.get("delta.setTransactionRetentionDuration", "interval 1000 days")
    words = retention.removeprefix("interval ").split()
    days = {"day": 1.0, "week": 7.0, "hour": 1 / 24, "minute": 1 / 1440}
    if len(words) != 2 or float(words[0]) * days.get(words[1].rstrip("s"), 0) < KEPT_DAYS:
        raise SinkError(
            f"{uri} forgets commits after {retention!r} (delta.setTransactionRetentionDuration):"
            f" use at least 'interval {KEPT_DAYS} days', or remove the property"
        )


def _attempts(history: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the attempts that a history records, by commit id."""
    attempts: dict[str, int] = {}
    for entry in history:
        text = entry.get("userMetadata") or ""
        if text.startswith('{"broadway": '):
            for name, attempt in json.loads(text)["broadway"].items():
                attempts.setdefault(name, attempt)
    return attempts


def _user_metadata(attempts: Mapping[str, int]) -> str:
    return json.dumps({"broadway": attempts})


def _forgotten(uri: str, commit_id: str) -> CommitInDoubt:
    return CommitInDoubt(
        f"{uri} has commit {commit_id}, but its history has been removed, so that its attempt is"
        " unknown: delta.logRetentionDuration must be longer than a run's lease"
    )


class _Client(SinkClient):
    """A table read and written by delta-rs."""

    def __init__(self, sink: DeltaTable, storage: Mapping[str, str]) -> None:
        self._deltalake = import_client("deltalake", "delta")
        self._sink, self._storage = sink, dict(storage)
        self._uri = sink.uri

    def load(self) -> Any:
        """Opens the newest version of the table.

        :raises SinkError: If it does not exist or cannot be read.
        """
        try:
            return self._deltalake.DeltaTable(self._sink.path, storage_options=self._storage)
        except self._deltalake.exceptions.TableNotFoundError:
            raise SinkError(f"{self._uri} does not exist: create the Delta Lake table") from None
        except Exception as error:
            raise SinkError(f"{self._uri} cannot be read: {reason_of(error)}") from None

    def commit(self, rows: Any, commit: Commit) -> None:
        def append(table: Any, properties: Any) -> None:
            self._deltalake.write_deltalake(
                table,
                rows,
                mode="append",
                schema_mode="merge" if self._sink.schema_mode == "merge" else None,
                commit_properties=properties,
            )

        self._commit(commit, append)

    def delete(self, interval: Interval, commit: Commit) -> None:
        column = self._sink.time_column
        start, end = (f"'{bound.isoformat()}'" for bound in interval)

        def delete(table: Any, properties: Any) -> None:
            deleted = table.delete(
                f'"{column}" >= {start} AND "{column}" < {end}', commit_properties=properties
            )
            if not deleted["num_deleted_rows"]:  # then nothing was committed
                table.create_write_transaction(
                    [], "append", table.schema(), commit_properties=properties
                )

        self._commit(commit, delete)

    def _commit(self, commit: Commit, write: Callable[[Any, Any], None]) -> None:
        """Writes with the handle that read the transaction identifier.

        :param write: Takes the table and the commit's properties.
        """
        table = self.load()
        recorded = self._recorded(table, [commit.commit_id])
        if has_landed(recorded.get(commit.commit_id), commit, self._uri):
            return
        try:
            write(table, self._properties(_COMMITTED, {commit.commit_id: commit.attempt}))
        except self._deltalake.exceptions.SchemaMismatchError as error:
            raise SinkError(
                f"{self._uri} has other columns than the rows: {reason_of(error)}; nothing was"
                " written"
            ) from None
        except self._deltalake.exceptions.CommitFailedError as error:
            try:
                recorded = self._recorded(self.load(), [commit.commit_id])
            except SinkError:
                raise error from None
            if not has_landed(recorded.get(commit.commit_id), commit, self._uri):
                raise

    def landed(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        recorded = self._recorded(self.load(), commit_ids)
        return {name: attempt for name, attempt in recorded.items() if attempt != RULED_OUT}

    def rule_out(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        for _ in range(100):  # each conflict is a commit of one of these ids
            table = self.load()
            recorded = self._recorded(table, commit_ids)
            open_ids = sorted(set(commit_ids) - recorded.keys())
            if not open_ids:
                break
            properties = self._properties(_TOMBSTONE, dict.fromkeys(open_ids, RULED_OUT))
            try:
                table.create_write_transaction(
                    [], "append", table.schema(), commit_properties=properties
                )
            except self._deltalake.exceptions.CommitFailedError:
                continue
            except Exception as error:
                raise SinkError(f"{self._uri} cannot be written: {reason_of(error)}") from None
        else:
            raise SinkError(f"{self._uri} has too many other writers at present: try again")
        return {name: attempt for name, attempt in recorded.items() if attempt != RULED_OUT}

    def _recorded(self, table: Any, commit_ids: Collection[str]) -> dict[str, int]:
        """Returns the recorded attempts; that of a tombstone is :data:`RULED_OUT`."""
        versions = {name: table.transaction_version(name) for name in commit_ids}
        recorded = {name: RULED_OUT for name, version in versions.items() if version == _TOMBSTONE}
        committed = [name for name, version in versions.items() if version == _COMMITTED]
        for limit in (_NEWEST, None) if committed else ():
            attempts = _attempts(table.history(limit))
            if all(name in attempts for name in committed):
                return recorded | {name: attempts[name] for name in committed}
        if committed:
            raise _forgotten(self._uri, committed[0])
        return recorded

    def _properties(self, version: int, attempts: Mapping[str, int]) -> Any:
        # Without a time a table never forgets them, whatever its retention.
        transaction, now = self._deltalake.Transaction, int(time.time() * 1000)
        return self._deltalake.CommitProperties(
            custom_metadata={"userMetadata": _user_metadata(attempts)},
            app_transactions=[transaction(name, version, now) for name in attempts],
        )


class _SparkClient(SinkClient):
    """A table read and written by Delta Lake on Spark."""

    def __init__(self, sink: DeltaTable, spark: Any) -> None:
        self._sink, self._spark, self._uri = sink, spark, sink.uri

    def properties(self) -> Mapping[str, str]:
        """Returns the table's properties.

        :raises SinkError: If it does not exist or cannot be read.
        """
        try:
            [detail] = self._sql("DESCRIBE DETAIL delta.`{}`")
        except SinkError as error:
            raise SinkError(
                f"{error}; it must be a Delta Lake table, and Spark needs Delta Lake's jars,"
                " extension and catalog"
            ) from None
        properties: Mapping[str, str] = detail["properties"]
        return properties

    def commit(self, rows: Any, commit: Commit) -> None:
        if not self._write(rows, commit.commit_id, commit.attempt):
            has_landed(self._recorded([commit.commit_id])[commit.commit_id], commit, self._uri)

    def landed(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        attempts = self._attempts(commit_ids)
        return {name: attempt for name, attempt in attempts.items() if attempt != RULED_OUT}

    def rule_out(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        open_ids = sorted(set(commit_ids) - self._attempts(commit_ids).keys())
        try:
            schema = self._spark.read.format("delta").load(self._sink.path).schema
            for name in open_ids:
                self._write(self._spark.createDataFrame([], schema), name, RULED_OUT)
        except Exception as error:
            raise SinkError(f"{self._uri} cannot be written: {spark_reason(error)}") from None
        attempts = self._recorded(commit_ids)
        return {name: attempt for name, attempt in attempts.items() if attempt != RULED_OUT}

    def _write(self, rows: Any, commit_id: str, attempt: int) -> bool:
        """Writes rows unless the commit id is recorded; returns whether it did for sure."""
        # Delta Lake sets it to the version of each commit of this session, which one batch has.
        last = "spark.databricks.delta.lastCommitVersionInSession"
        self._spark.conf.unset(last)
        try:
            rows.write.format("delta").mode("append").options(
                txnAppId=commit_id,
                txnVersion=_COMMITTED,
                userMetadata=_user_metadata({commit_id: attempt}),
                mergeSchema=self._sink.schema_mode == "merge",
            ).save(self._sink.path)
        except Exception as error:
            if "DELTA_CONCURRENT_TRANSACTION" not in str(error):
                raise
            return False  # recorded since this write began
        return self._spark.conf.get(last, None) is not None

    def _recorded(self, commit_ids: Collection[str]) -> dict[str, int]:
        """Returns the attempts of commit ids that the table has; that of a tombstone, too."""
        attempts = self._attempts(commit_ids)
        for name in commit_ids:
            if name not in attempts:
                raise _forgotten(self._uri, name)
        return attempts

    def _attempts(self, commit_ids: Collection[str]) -> dict[str, int]:
        for limit in (f" LIMIT {_NEWEST}", ""):
            history = self._sql("DESCRIBE HISTORY delta.`{}`" + limit)
            attempts = _attempts(row.asDict() for row in history)
            if all(name in attempts for name in commit_ids):
                break
        return {name: attempts[name] for name in commit_ids if name in attempts}

    def _sql(self, text: str) -> list[Any]:
        try:
            rows: list[Any] = self._spark.sql(text.format(self._sink.path)).collect()
        except Exception as error:
            raise SinkError(f"{self._uri} cannot be read: {spark_reason(error)}") from None
        return rows
