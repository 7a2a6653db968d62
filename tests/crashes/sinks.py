"""The sinks of the pipelines, and the boundaries of their clients."""

from __future__ import annotations

import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from airflow_broadway.core.model.connections import VARIABLE
from airflow_broadway.testing.crashes.interceptor import Boundary, Interceptor, replace
from airflow_broadway.testing.crashes.sink import call_in_fork, count_rows
from airflow_broadway.testing.crashes.subject import Subject
from tests.cluster.services import PostgreSQL, ServiceMissing, find_postgres
from tests.sink_subjects import iceberg_database

CONNECTION, CATALOG = "crashes_postgres", "crashes_iceberg"


class SinkUnderTest(ABC):
    """A sink for the batches of one subject.

    A process that forks must not use deltalake or pyarrow: their threads would be missing in forks.
    """

    #: The boundaries of its client.
    boundaries: Sequence[Boundary] = ()

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The options of the sink."""

    def create(self) -> None:  # noqa: B027 - a folder is created by its first commit
        """Creates the table; called in a separate process."""

    @abstractmethod
    def read(self, folder: Path) -> list[dict[str, Any]]:
        """Returns all rows."""

    def attach(self) -> None:
        """Makes the subject commit its batches to this sink and read its rows from it."""
        subject, log = self.subject, self.subject.folder / "log.txt"
        overrides, boundaries = subject.overrides, subject.boundaries
        sink = {"batchers": {"default": {"sink": self.options}}}

        def rows(ids: Sequence[str]) -> Counter[str]:
            return count_rows(self.read, subject.work, log, ids)

        call_in_fork(self.create, subject.work, log, "the table")
        replaced: Any = subject
        replaced.overrides = lambda: {**overrides(), **sink}
        replaced.boundaries = lambda: [*boundaries(), *self.boundaries]
        replaced.rows = rows


class Folder(SinkUnderTest):
    """A folder of Parquet files; the boundary of local files intercepts it."""

    @property
    def options(self) -> dict[str, Any]:
        return {"path": str(self.subject.work / "lake")}

    def read(self, folder: Path) -> list[dict[str, Any]]:
        import pyarrow.dataset as ds

        lake = folder / "lake"
        table = ds.dataset(lake).to_table(use_threads=False) if lake.exists() else None
        return table.to_pylist() if table else []


def _intercept_table(
    interceptor: Interceptor,
    kind: str,
    *,
    changes: bool,
    error: Callable[[], Exception],
    timeout: Callable[[], Exception],
) -> Callable[[Any], Any]:
    """Returns the wrapper of a library's call on a table.

    :param changes: Whether the call commits.
    """

    def wrap(do: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return interceptor.call(
                kind,
                "table",
                partial(do, *args, **kwargs),
                changes=changes,
                error=error,
                timeout=timeout,
                late=changes,
            )

        return call

    return wrap


class _DeltaLake:
    """Intercepts deltalake's reads and commits of a table."""

    def install(self, interceptor: Interceptor) -> None:
        import deltalake

        wrap = partial(
            _intercept_table,
            interceptor,
            error=lambda: deltalake.exceptions.DeltaError("an error was injected"),
            timeout=lambda: OSError("the store timed out"),
        )
        replace(deltalake.DeltaTable, "__init__", wrap("load", changes=False))
        replace(deltalake.DeltaTable, "create_write_transaction", wrap("tombstone", changes=True))
        replace(deltalake.DeltaTable, "delete", wrap("delete", changes=True))
        replace(deltalake, "write_deltalake", wrap("append", changes=True))


class Delta(SinkUnderTest):
    """A Delta Lake table in a folder."""

    boundaries = (_DeltaLake(),)

    @property
    def options(self) -> dict[str, Any]:
        return {"path": str(self.subject.work / "table")}

    def create(self) -> None:
        import deltalake
        import pyarrow as pa

        columns = {"number": pa.string(), **self.more_columns(pa)}
        deltalake.DeltaTable.create(self.options["path"], schema=pa.schema(columns))

    def more_columns(self, pa: Any) -> dict[str, Any]:
        return {}

    def read(self, folder: Path) -> list[dict[str, Any]]:
        import deltalake

        rows: list[dict[str, Any]] = (
            deltalake.DeltaTable(self.options["path"]).to_pyarrow_table().to_pylist()
        )
        return rows


class DeltaByTime(Delta):
    """A Delta Lake table with a column of timestamps."""

    def more_columns(self, pa: Any) -> dict[str, Any]:
        return {"at": pa.timestamp("us", tz="UTC")}


class _Psycopg:
    """Intercepts the statements of every connection to PostgreSQL."""

    _CHANGES = ("INSERT", "DELETE", "CREATE", "DROP", "COPY", "COMMIT")

    def install(self, interceptor: Interceptor) -> None:
        import psycopg

        def broken() -> Exception:
            return psycopg.OperationalError("the connection is lost")

        def call(verb: str, do: Callable[[], Any]) -> Any:
            changes = verb in self._CHANGES
            return interceptor.call(verb, "", do, changes=changes, error=broken, timeout=broken)

        def verb_of(query: Any) -> str:
            text = query if isinstance(query, str) else query.as_string()
            return str(text.split(None, 1)[0])

        def of_statement(do: Any) -> Any:
            def execute(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
                return call(verb_of(query), lambda: do(self, query, *args, **kwargs))

            return execute

        def of_name(name: str) -> Callable[[Any], Any]:
            def wrap(do: Any) -> Any:
                return lambda *args, **kwargs: call(name, partial(do, *args, **kwargs))

            return wrap

        replace(psycopg, "connect", of_name("CONNECT"))
        replace(psycopg.Connection, "execute", of_statement)
        replace(psycopg.Connection, "commit", of_name("COMMIT"))
        replace(psycopg.Copy, "write", of_name("COPY"))


class Postgres(SinkUnderTest):
    """A table per case in the campaign's PostgreSQL."""

    boundaries = (_Psycopg(),)

    @property
    def options(self) -> dict[str, Any]:
        salt = "".join(filter(str.isalnum, self.subject.salt)).lower()
        ledger = f"public.ledger_{salt}"
        return {"table": f"public.rows_{salt}", "conn_id": CONNECTION, "ledger": ledger}

    def create(self) -> None:
        with _connect() as session:
            session.execute(f"CREATE TABLE {self.options['table']} (number text)")

    def read(self, folder: Path) -> list[dict[str, Any]]:
        with _connect() as session:
            rows = session.execute(f"SELECT number FROM {self.options['table']}")
            return [{"number": number} for (number,) in rows]


class _PyIceberg:
    """Intercepts pyiceberg's reads and commits of a table."""

    def install(self, interceptor: Interceptor) -> None:
        from pyiceberg.catalog.sql import SqlCatalog

        wrap = partial(
            _intercept_table,
            interceptor,
            error=lambda: OSError("an error was injected"),
            timeout=lambda: TimeoutError("the catalog timed out"),
        )
        replace(SqlCatalog, "load_table", wrap("load", changes=False))
        replace(SqlCatalog, "commit_table", wrap("commit", changes=True))


class Iceberg(SinkUnderTest):
    """A table in a folder, with its catalog in the campaign's PostgreSQL."""

    boundaries = (_PyIceberg(),)

    @property
    def options(self) -> dict[str, Any]:
        salt = "".join(filter(str.isalnum, self.subject.salt)).lower()
        return {"table": f"orders.t{salt}", "catalog": "lake", "conn_id": CATALOG}

    def create(self) -> None:
        import pyarrow as pa

        schema = pa.schema([pa.field("number", pa.string())])
        properties = {"history.expire.max-snapshot-age-ms": str(32 * 86_400_000)}
        self._catalog().create_table(
            self.options["table"],
            schema,
            f"file://{self.subject.work}/table",
            properties=properties,
        )

    def read(self, folder: Path) -> list[dict[str, Any]]:
        table = self._catalog().load_table(self.options["table"])
        rows: list[dict[str, Any]] = table.scan().to_arrow().to_pylist()
        return rows

    def _catalog(self) -> Any:
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("lake", **json.loads(os.environ[VARIABLE])[CATALOG]["extra"])
        catalog.create_namespace_if_not_exists("orders")
        return catalog


def _connect() -> Any:
    import psycopg

    address = json.loads(os.environ[VARIABLE])[CONNECTION]
    return psycopg.connect(
        host=address["host"], port=address["port"], user=address["login"], dbname=address["schema"]
    )


def has_postgresql() -> bool:
    """Returns whether PostgreSQL is installed."""
    try:
        find_postgres()
    except ServiceMissing:
        return False
    return True


@contextmanager
def postgresql() -> Iterator[None]:
    """Runs the server of :class:`Postgres` and :class:`Iceberg`.

    All tasks find its address in the environment.

    :raises ServiceMissing: If PostgreSQL is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="crashes-postgresql-") as folder:
        os.chmod(folder, 0o755)  # the server runs as another user
        server = PostgreSQL(Path(folder) / "server", "127.0.0.1")
        host, port = server.url.rpartition("@")[2].partition("/")[0].split(":")
        connection = {
            "conn_id": CONNECTION,
            "host": host,
            "port": int(port),
            "login": "airflow",
            "schema": "airflow",
        }
        catalog = {"conn_id": CATALOG, "extra": iceberg_database(Path(folder), host, int(port))}
        os.environ[VARIABLE] = json.dumps({CONNECTION: connection, CATALOG: catalog})
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            server.stop()
