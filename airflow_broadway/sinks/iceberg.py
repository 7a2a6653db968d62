"""The sink for an Apache Iceberg table.

The summary of a snapshot has the commit ids that it records, and so has that of a tombstone, which
is an empty snapshot.  A catalog refuses a snapshot whose parent is not the newest one of the
table.  pyiceberg then appends it once more to what has changed since: its retries are off for this
handle, and each try begins by looking for the id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, ClassVar, Final

from airflow_broadway.core.masking import reason_of
from airflow_broadway.core.model.options import Options, option, options
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
from airflow_broadway.core.schema.values import UTC
from airflow_broadway.sinks.fencing import (
    KEPT_DAYS,
    RULED_OUT,
    TIME_COLUMN,
    check_time_column,
    has_landed,
    import_client,
)

#: The key of a snapshot's summary: attempts by commit id, as JSON.
_COMMITS: Final = "broadway.commits"
#: The table property that says for how long snapshots are kept, and Iceberg's default.
_MAX_AGE, _DEFAULT_DAYS = "history.expire.max-snapshot-age-ms", 5
_MS_PER_DAY: Final = 86_400_000
#: The newest format version that pyiceberg writes.
_NEWEST_FORMAT: Final = 2
#: Tries against a newer snapshot, where others write to the same table.
_TRIES: Final = 100


@options
class IcebergTable(Options, Sink):
    """An Apache Iceberg table; see ``docs/sink-tables.md``."""

    spark_note: ClassVar[str] = (
        "Apache Iceberg 1.12 has runtimes for Spark 3.5, 4.0 and 4.1, and that for 4.1 does not run"
        " on 4.2: use engine='python'"
    )

    table: str = option(
        rule=matching(r"[^.\s]+(\.[^.\s]+)+", "a namespace and a table, such as 'lake.orders'"),
        doc="The table, with its namespace; it must exist.",
    )
    conn_id: str | None = option(
        default=None,
        rule=CONN_ID.or_none(),
        doc="The connection of the catalog: the extra has pyiceberg's properties; a host is"
        " ``uri``, login and password are ``credential``.  ``None``: pyiceberg's own"
        " configuration.",
    )
    catalog: str = option(default="default", rule=TEXT, doc="The catalog's name.")
    schema_mode: str = option(
        default="strict",
        rule=one_of("strict", "merge"),
        doc="New columns: ``merge`` adds them to the table, ``strict`` refuses them.",
    )

    time_column: str | None = option(default=None, rule=TEXT.or_none(), doc=TIME_COLUMN)

    @property
    def uri(self) -> str:
        return f"iceberg://{self.catalog}/{self.table.replace('.', '/')}"

    @property
    def connection_ids(self) -> tuple[str, ...]:
        return () if self.conn_id is None else (self.conn_id,)

    def open(self, env: SinkEnv) -> SinkClient:
        # A database's session may have ended between two commits; all snapshots are needed.
        properties = {"pool_pre_ping": "true", "snapshot-loading-mode": "all"}
        if self.conn_id is not None:
            connection = env.connections.get(self.conn_id)
            if connection.host:
                properties["uri"] = connection.host
            if connection.password:
                properties["credential"] = f"{connection.login}:{connection.password}"
            properties |= {name: str(value) for name, value in connection.extra.items()}
        return _Client(self, properties)


class _Client(SinkClient):
    """A table read and written by pyiceberg."""

    def __init__(self, sink: IcebergTable, properties: Mapping[str, str]) -> None:
        self._sink, self._uri = sink, sink.uri
        catalogs = import_client("pyiceberg.catalog", "iceberg")
        self._errors = import_client("pyiceberg.exceptions", "iceberg")
        try:
            self._catalog = catalogs.load_catalog(sink.catalog, **properties)
            self._table = self._catalog.load_table(sink.table)
        except self._errors.NoSuchTableError:
            raise SinkError(f"{self._uri} does not exist: create the Iceberg table") from None
        except Exception as error:
            raise SinkError(f"{self._uri} cannot be opened: {reason_of(error)}") from None
        _check(self._table.metadata, self._uri)
        if sink.time_column is not None:
            kinds = {field.name: str(field.field_type) for field in self._table.schema().fields}
            check_time_column(self._uri, sink.time_column, kinds.get(sink.time_column))
        self._first = self._table.metadata.current_snapshot_id

    def commit(self, rows: Any, commit: Commit) -> None:
        def append(transaction: Any, summary: dict[str, str]) -> None:
            if self._sink.schema_mode == "merge":
                self._add_columns(transaction, rows.schema)
            fitted = _as_required(rows, transaction.table_metadata.schema())
            transaction.append(fitted, snapshot_properties=summary)

        self._commit(commit, append)

    def delete(self, interval: Interval, commit: Commit) -> None:
        expressions = import_client("pyiceberg.expressions", "iceberg")

        def delete(transaction: Any, summary: dict[str, str]) -> None:
            column = self._sink.time_column
            kind = str(transaction.table_metadata.schema().find_type(column))
            start, end = (_literal(time, kind) for time in interval)
            since = expressions.GreaterThanOrEqual(column, start)
            within = expressions.And(since, expressions.LessThan(column, end))
            transaction.delete(within, snapshot_properties=summary)
            # Without rows in the interval there is no snapshot yet.
            with transaction.update_snapshot(summary).fast_append():
                pass

        self._commit(commit, delete)

    def _commit(self, commit: Commit, write: Callable[[Any, dict[str, str]], None]) -> None:
        """Writes in a transaction on the snapshots that the commit id was looked for in.

        :param write: Takes the transaction and the summary of its snapshots.
        """
        for _ in range(_TRIES):
            recorded = self._refresh()
            if has_landed(recorded.get(commit.commit_id), commit, self._uri):
                return
            transaction = self._table.transaction()
            try:
                write(transaction, _summary({commit.commit_id: commit.attempt}))
            except (ValueError, TypeError) as error:
                reason = " ".join(re.sub(r"[\u2500-\u257f]", " ", str(error)).split())
                raise SinkError(
                    f"{self._uri} cannot take the rows: {reason[:500]}; nothing was written"
                ) from None
            try:
                transaction.commit_transaction()
            except self._errors.CommitFailedException:
                continue
            return
        raise self._busy()

    def landed(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        recorded = self._refresh()
        return {name: recorded[name] for name in commit_ids if recorded.get(name)}

    def rule_out(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        for _ in range(_TRIES):
            recorded = self._refresh()
            open_ids = sorted(set(commit_ids) - recorded.keys())
            if not open_ids:
                return {name: recorded[name] for name in commit_ids if recorded[name] != RULED_OUT}
            try:
                with self._table.transaction() as transaction:
                    summary = _summary(dict.fromkeys(open_ids, RULED_OUT))
                    with transaction.update_snapshot(summary).fast_append():
                        pass
            except self._errors.CommitFailedException:
                continue
            except Exception as error:
                raise SinkError(f"{self._uri} cannot be written: {reason_of(error)}") from None
        raise self._busy()

    def close(self) -> None:
        self._catalog.close()

    def _refresh(self) -> dict[str, int]:
        """Reads the newest snapshots; returns the recorded attempts, by commit id.

        :raises CommitInDoubt: If snapshots have been removed since the table was opened.
        :raises SinkError: If the table cannot be read.
        """
        try:
            metadata = self._table.refresh().metadata
        except Exception as error:
            raise SinkError(f"{self._uri} cannot be read: {reason_of(error)}") from None
        snapshots = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
        attempts: dict[str, int] = {}
        ancestor = metadata.current_snapshot_id
        lineage = {ancestor}
        while ancestor in snapshots:
            snapshot = snapshots[ancestor]
            attempts |= json.loads((snapshot.summary and snapshot.summary[_COMMITS]) or "{}")
            ancestor = snapshot.parent_snapshot_id
            lineage.add(ancestor)
        if self._first not in lineage:
            raise CommitInDoubt(
                f"{self._uri} has lost snapshots since this sink was opened, and with them the"
                f" commits that they record: expire none that are younger than {KEPT_DAYS} days"
            )
        # pyiceberg copies the metadata 19 times for an append, which needs no older snapshot.
        newest = [snapshots[i] for i in snapshots if i == metadata.current_snapshot_id]
        properties = metadata.properties | {"commit.retry.num-retries": "0"}
        self._table.metadata = metadata.model_copy(
            update={"snapshots": newest, "snapshot_log": [], "properties": properties}
        )
        return attempts

    @staticmethod
    def _add_columns(transaction: Any, schema: Any) -> None:
        import pyarrow as pa

        known = transaction.table_metadata.schema().column_names
        new = [field for field in schema if field.name not in known]
        if new:
            with transaction.update_schema() as update:
                update.union_by_name(pa.schema(new))

    def _busy(self) -> SinkError:
        return SinkError(f"{self._uri} has too many other writers at present: try again")


def _literal(time: datetime, kind: str) -> str:
    """Returns a time as a literal of a column's type; of one without a zone in UTC."""
    if kind.startswith("timestamptz"):
        return time.isoformat()
    naive = time.astimezone(UTC).replace(tzinfo=None)
    return naive.date().isoformat() if kind == "date" else naive.isoformat()


def _summary(attempts: Mapping[str, int]) -> dict[str, str]:
    return {_COMMITS: json.dumps(attempts)}


def _check(metadata: Any, uri: str) -> None:
    """Refuses a table that forgets commits, or that pyiceberg cannot write.

    :raises SinkError: If its retention is too short, or its format too new.
    """
    if metadata.format_version > _NEWEST_FORMAT:
        raise SinkError(
            f"{uri} has format version {metadata.format_version}, of which pyiceberg can write no"
            f" rows and no tombstones: use a table of version {_NEWEST_FORMAT}"
        )
    main = metadata.refs.get("main")
    retention = (main and main.max_snapshot_age_ms) or metadata.properties.get(
        _MAX_AGE, _DEFAULT_DAYS * _MS_PER_DAY
    )
    if int(retention) < KEPT_DAYS * _MS_PER_DAY:
        raise SinkError(
            f"{uri} forgets commits after {int(retention) / _MS_PER_DAY:g} days ({_MAX_AGE}): set"
            f" this property of the table to at least {KEPT_DAYS * _MS_PER_DAY} ({KEPT_DAYS} days)"
        )


def _as_required(rows: Any, schema: Any) -> Any:
    """Marks columns without nulls as such, where the table requires it."""
    import pyarrow as pa

    required = {field.name for field in schema.fields if field.required}
    fields = [
        field.with_nullable(field.name not in required or rows[field.name].null_count > 0)
        for field in rows.schema
    ]
    return rows.cast(pa.schema(fields))
