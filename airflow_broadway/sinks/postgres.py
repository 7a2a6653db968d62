"""The sink for a table of PostgreSQL.

A batch's rows and its row in the ledger are one transaction.  The ledger's primary key is the
commit id, and a tombstone is a row of the ledger without rows in the table.  What locks the ledger
or a key of it is one request with ``COMMIT``: a client that pauses holds no such lock.

Spark's executors write to an unlogged *staging* table of the attempt, each task in a transaction of
its own; the driver's transaction moves the rows.  Each row has an id there, which shows whether a
task wrote twice, and the first row shows whether the server lost the table's content in a crash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from airflow_broadway.core.masking import reason_of
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.core.model.options import Options, option, options
from airflow_broadway.core.model.rules import CONN_ID, matching
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.core.model.sink import (
    Commit,
    CommitRefused,
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

if TYPE_CHECKING:
    from psycopg import Connection as Session
    from psycopg.sql import Composed

_NAME: Final = r"[A-Za-z_]\w{0,62}"
_TABLE: Final = matching(rf"{_NAME}\.{_NAME}", "a schema and a table, such as 'public.orders'")
#: Rows that one message of a COPY carries.
_COPIED_ROWS: Final = 10_000
#: The prefix of staging tables, in the ledger's schema, and the column with the ids of rows.
_STAGING, _ROW = "broadway_staging_", "_broadway_row"
#: The parameters of a connection's extra that libpq and Spark's JDBC driver get.
_PARAMETERS: Final = ("sslmode", "sslrootcert", "sslcert", "sslkey", "target_session_attrs")


@options
class PostgresTable(Options, Sink):
    """A table of PostgreSQL, version 12 or later; see ``docs/sink-tables.md``."""

    table: str = option(rule=_TABLE, doc="The table, with its schema; it must exist.")
    conn_id: str = option(
        default="postgres_default", rule=CONN_ID, doc="The connection of the database."
    )
    ledger: str = option(
        default="public.broadway_commits",
        rule=_TABLE,
        doc="The table of commit ids, in the same database; created if it does not exist.",
    )

    time_column: str | None = option(
        default=None, rule=matching(_NAME, "the name of a column").or_none(), doc=TIME_COLUMN
    )

    @property
    def uri(self) -> str:
        # Airflow's PostgreSQL provider refuses assets of the scheme "postgres" without a database.
        return f"x-postgres://{self.conn_id}/{self.table.replace('.', '/')}"

    @property
    def commits_uri(self) -> str:
        return f"{self.uri}?ledger={self.ledger}"

    @property
    def connection_ids(self) -> tuple[str, ...]:
        return (self.conn_id,)

    def open(self, env: SinkEnv) -> SinkClient:
        return _Client(self, env.connections.get(self.conn_id))

    def open_spark(self, spark: Any, env: SinkEnv) -> SinkClient:
        return _SparkClient(self, env.connections.get(self.conn_id))


class _Client(SinkClient):
    """Reconnects for each call: hours may lie between two commits.

    :raises SinkError: If the database cannot be reached, or lacks the table or a privilege.
    """

    def __init__(self, sink: PostgresTable, connection: Connection) -> None:
        self._psycopg = import_client("psycopg", "postgres")
        self._sink, self._connection = sink, connection
        identifier = self._psycopg.sql.Identifier
        self._table = identifier(*sink.table.split("."))
        self._ledger = identifier(*sink.ledger.split("."))
        self._prepare()

    def _prepare(self) -> None:
        """Creates the ledger, and checks that the table exists."""
        with self._reaching() as session:
            self._run(session, "SELECT FROM {table} LIMIT 0")
            if self._sink.time_column is not None:
                query = "SELECT atttypid::regtype FROM pg_attribute WHERE attrelid = %s::regclass"
                name = [self._table.as_string(), self._sink.time_column]
                row = session.execute(f"{query} AND attname = %s", name).fetchone()
                check_time_column(self.uri, self._sink.time_column, row[0] if row else None)
            exists = session.execute("SELECT to_regclass(%s)", [self._ledger.as_string()])
            if exists.fetchone() != (None,):
                return
            # Two that create it together: IF NOT EXISTS lets one of them fail.
            self._run(
                session,
                "SELECT pg_advisory_xact_lock(8675309); CREATE TABLE IF NOT EXISTS {ledger}"
                " (target text, commit_id text, attempt integer NOT NULL,"
                " at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (target, commit_id)); COMMIT",
            )

    def commit(self, rows: Any, commit: Commit) -> None:
        def write(session: Session) -> None:
            text = "COPY {table} ({columns}) FROM STDIN (FORMAT csv)"
            with session.cursor().copy(self._compose(text, rows.column_names)) as copy:
                for start in range(0, len(rows), _COPIED_ROWS):
                    copy.write(_as_csv(rows.slice(start, _COPIED_ROWS)))

        self._commit(commit, write)

    def delete(self, interval: Interval, commit: Commit) -> None:
        def write(session: Session) -> None:
            session.execute("SET LOCAL timezone = 'UTC'")  # of a timestamp without a time zone
            text = "DELETE FROM {table} WHERE {columns} >= %s AND {columns} < %s"
            columns = [str(self._sink.time_column)]
            session.execute(self._compose(text, columns), [interval.start, interval.end])

        self._commit(commit, write)

    def _commit(self, commit: Commit, write: Any) -> None:
        """Writes, and inserts the commit id, in one transaction."""
        if has_landed(self.recorded([commit.commit_id]).get(commit.commit_id), commit, self.uri):
            return
        try:
            with self._session() as session:
                write(session)
                self._run(
                    session,
                    "INSERT INTO {ledger} (target, commit_id, attempt) VALUES ({values}); COMMIT",
                    values=[self._sink.table, commit.commit_id, commit.attempt],
                )
        except self._psycopg.errors.UniqueViolation as error:
            if error.diag.table_name != self._sink.ledger.split(".")[1]:
                raise self._error(error) from None
            raise CommitRefused(
                f"{self.uri} refuses commit {commit.commit_id}: it was ruled out, or another"
                " attempt has landed; nothing was written"
            ) from None
        except self._psycopg.Error as error:
            # Without a state the connection broke; 08 and 57P are the server's words for it.
            if error.sqlstate and not error.sqlstate.startswith(("08", "57P")):
                raise self._error(error) from None
            raise

    @property
    def uri(self) -> str:
        """The table's address."""
        return self._sink.uri

    def landed(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        attempts = self.recorded(commit_ids)
        return {name: attempt for name, attempt in attempts.items() if attempt != RULED_OUT}

    def recorded(self, commit_ids: Collection[str]) -> dict[str, int]:
        """Returns the recorded attempts; that of a tombstone is :data:`RULED_OUT`."""
        with self._reaching() as session:
            query = (
                "SELECT commit_id, attempt FROM {ledger} WHERE target = %s AND commit_id = ANY(%s)"
            )
            rows = session.execute(self._compose(query), [self._sink.table, list(commit_ids)])
            return dict(rows.fetchall())

    def rule_out(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        ids = sorted(commit_ids)
        with self._reaching() as session:
            session.execute("SET LOCAL lock_timeout = '30s'")
            self._run(
                session,
                "INSERT INTO {ledger} (target, commit_id, attempt) SELECT {values}"
                " ON CONFLICT DO NOTHING;"
                f" DELETE FROM {{ledger}} WHERE at < now() - interval '{KEPT_DAYS} days'; COMMIT",
                values=[
                    self._sink.table,
                    self._psycopg.sql.SQL("unnest({}::text[])").format(ids),
                    0,
                ],
            )
        self._drop_staging()
        return self.landed(ids)  # of a new snapshot, which has what the insert waited for

    def _drop_staging(self, name: str | None = None) -> None:
        """Drops a staging table, or those of all decided commits, which dead drivers have left.

        One that is in use stays.
        """
        query = (
            "SELECT relname FROM pg_class WHERE relnamespace = {values}::regnamespace"
            f" AND relkind = 'r' AND starts_with(relname, '{_STAGING}') AND EXISTS (SELECT FROM"
            " {ledger} WHERE md5(target || ' ' || commit_id) ="
            f" substr(relname, {len(_STAGING) + 1}, 32))"
        )
        with suppress(SinkError), self._reaching() as session:
            session.execute("SET LOCAL lock_timeout = '1s'")
            names = [name] if name else []
            if name is None:
                tables = session.execute(self._compose(query, values=[self._schema]))
                names = [row[0] for row in tables.fetchall()]
            for staging in names:
                self._run(
                    session, "DROP TABLE IF EXISTS {values}", values=[self._in_schema(staging)]
                )

    @property
    def _schema(self) -> str:
        return self._sink.ledger.split(".")[0]

    def _in_schema(self, name: str) -> Any:
        return self._psycopg.sql.Identifier(self._schema, name)

    @contextmanager
    def _session(self) -> Iterator[Session]:
        """Yields a session in a transaction, which is committed unless the block raises."""
        extra = {n: self._connection.extra[n] for n in _PARAMETERS if n in self._connection.extra}
        connection = self._connection
        opened = self._psycopg.connect(
            host=connection.host,
            port=connection.port or 5432,
            user=connection.login or None,
            password=connection.password or None,
            dbname=connection.schema or None,
            client_encoding="utf8",
            application_name="airflow-broadway",
            connect_timeout=30,
            prepare_threshold=None,
            **extra,
        )
        # psycopg leaves a connection open whose COMMIT failed.
        with closing(opened), opened as session:
            # A driver that was paused with rows in hand, which others may wait for.
            session.execute("SET idle_in_transaction_session_timeout = '10min'")
            yield session

    @contextmanager
    def _reaching(self) -> Iterator[Session]:
        """Yields a session; its errors are those of the sink."""
        try:
            with self._session() as session:
                yield session
        except self._psycopg.Error as error:
            raise self._error(error) from None

    def _run(self, session: Session, text: str, **parts: Any) -> None:
        session.execute(self._compose(text, **parts))

    def _compose(
        self, text: str, columns: Collection[str] = (), values: Collection[Any] = ()
    ) -> Composed:
        sql = self._psycopg.sql
        composed: Composed = sql.SQL(text).format(
            table=self._table,
            ledger=self._ledger,
            columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
            values=sql.SQL(", ").join(
                value if isinstance(value, sql.Composable) else sql.Literal(value)
                for value in values
            ),
        )
        return composed

    def _error(self, error: Any) -> SinkError:
        reason = error.diag.message_primary or reason_of(error)
        return SinkError(f"{self.uri}: {reason}; nothing was written")


class _SparkClient(_Client):
    """Executors write to a staging table, by JDBC; the driver moves its rows."""

    def commit(self, rows: Any, commit: Commit) -> None:
        key = hashlib.md5(f"{self._sink.table} {commit.commit_id}".encode()).hexdigest()
        name = f"{_STAGING}{key}_{commit.attempt}"
        self._drop_staging(name)
        try:
            self._stage(rows, name)
            self._commit(commit, lambda session: self._move(session, rows.columns, name))
        except SinkError:
            # Whatever decides a commit also drops its staging tables.
            has_landed(self.recorded([commit.commit_id]).get(commit.commit_id), commit, self.uri)
            raise
        finally:
            self._drop_staging(name)

    def _stage(self, rows: Any, name: str) -> None:
        from pyspark.sql import functions, types

        with self._reaching() as session:
            text = (
                f"CREATE UNLOGGED TABLE {{values}} AS SELECT {{columns}}, -1::bigint AS {_ROW}"
                " FROM (SELECT) AS one LEFT JOIN (SELECT * FROM {table} LIMIT 0) AS rows ON true"
            )
            self._run(session, text, columns=rows.columns, values=[self._in_schema(name)])
        nested = (types.ArrayType, types.MapType, types.StructType)
        columns = [
            functions.to_json(rows[f"`{field.name}`"]).alias(field.name)
            if isinstance(field.dataType, nested)
            else rows[f"`{field.name}`"]
            for field in rows.schema.fields
        ]
        numbered = rows.select(*columns, functions.monotonically_increasing_id().alias(_ROW))
        table = f'"{self._schema}"."{name}"'
        try:
            numbered.write.format("jdbc").mode("append").options(**self._jdbc(table)).save()
        except Exception as error:
            raise SinkError(
                f"{self.uri}: Spark could not stage the rows: {spark_reason(error)}; nothing was"
                " written"
            ) from None

    def _move(self, session: Session, columns: Collection[str], name: str) -> None:
        # In one statement, which has one snapshot.
        query = (
            "WITH moved AS (INSERT INTO {table} ({columns}) SELECT {columns} FROM {values} WHERE"
            " @ >= 0) SELECT count(*), count(DISTINCT @), min(@) FROM {values}"
        ).replace("@", _ROW)
        counts = session.execute(self._compose(query, columns, [self._in_schema(name)]))
        staged, distinct, first = counts.fetchone() or (0, 0, None)
        if first != -1 or staged != distinct:
            reason = "the server lost them" if first != -1 else "a task of Spark wrote twice"
            raise SinkError(
                f"{self.uri}: the staged rows are not whole, since {reason}; nothing was written"
            )

    def _jdbc(self, table: str) -> dict[str, str]:
        """Returns the options of Spark's writer, which masks its URL and password in plans."""
        connection = self._connection
        parameters = {n: connection.extra[n] for n in _PARAMETERS[:4] if n in connection.extra}
        # The server casts text to a column's type.
        parameters |= {"stringtype": "unspecified", "reWriteBatchedInserts": "true"}
        address = f"{connection.host}:{connection.port or 5432}/{connection.schema}"
        return {
            "url": f"jdbc:postgresql://{address}?{urlencode(parameters)}",
            "driver": "org.postgresql.Driver",
            "dbtable": table,
            "user": connection.login,
            "password": connection.password,
            "batchsize": "10000",
        }


def _as_csv(rows: Any) -> bytes:
    """Converts rows as COPY reads them: text is quoted, null is not; nested values are JSON."""
    import pyarrow as pa
    from pyarrow import csv

    columns = []
    for column in rows.columns:
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_nested(column.type):
            texts = [None if v is None else json.dumps(v, default=str) for v in column.to_pylist()]
            column = pa.array(texts, pa.string())
        elif pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            texts = [None if v is None else f"\\x{v.hex()}" for v in column.to_pylist()]
            column = pa.array(texts, pa.string())
        columns.append(column)
    written = BytesIO()
    quoted = csv.WriteOptions(include_header=False, quoting_style="all_valid")
    csv.write_csv(pa.table(columns, names=rows.column_names), written, quoted)
    return written.getvalue()
