"""Empty tables of each sink, for its tests."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.core.formats.commits import commit_rows
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.core.model.sink import Commit, SinkClient, SinkEnv, SinkError
from airflow_broadway.sinks import DeltaTable, IcebergTable, PostgresTable
from airflow_broadway.testing.sinks import SinkSubject, commit_of, rows_of
from tests.unit.spark.session import spark_session

SINKS: dict[str, Any] = {"delta": DeltaTable, "iceberg": IcebergTable, "postgres": PostgresTable}


class Connections:
    def __init__(self, connection: dict[str, Any]) -> None:
        self._connection = connection

    def get(self, conn_id: str) -> Connection:
        return Connection(conn_id=conn_id, **self._connection)


def delta(folder: Path) -> SinkSubject:
    import deltalake

    deltalake.DeltaTable.create(str(folder), schema=rows_of("a").schema)

    def read() -> list[str]:
        table = deltalake.DeltaTable(str(folder)).to_pyarrow_table()
        return [str(value) for value in table["message_id"].to_pylist()]

    return SinkSubject(DeltaTable(path=str(folder)), read)


def iceberg_database(folder: Path, host: str, port: int) -> dict[str, str]:
    """A catalog in the database ``airflow`` of a server without passwords."""
    # The server ends the session of a process that was stopped between its update and its commit.
    timeout = "options=-c%20idle_in_transaction_session_timeout%3D2s"
    return {
        "type": "sql",
        "uri": f"postgresql+psycopg://airflow@{host}:{port}/airflow?{timeout}",
        "warehouse": f"file://{folder}",
    }


def iceberg(properties: Mapping[str, str], more: Mapping[str, str] = {}) -> SinkSubject:
    """A table of a catalog, with more properties."""
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("lake", **properties)
    catalog.create_namespace_if_not_exists("orders")
    name = f"orders.t{uuid.uuid4().hex[:8]}"
    kept = {"history.expire.max-snapshot-age-ms": str(32 * 86_400_000)}
    catalog.create_table(name, rows_of("a").schema, properties={**kept, **more})

    def read() -> list[str]:
        rows = catalog.load_table(name).scan().to_arrow()
        return [str(value) for value in rows["message_id"].to_pylist()]

    env = SinkEnv(connections=Connections({"extra": properties}))
    return SinkSubject(IcebergTable(table=name, catalog="lake", conn_id="lake"), read, env)


def postgres(host: str, port: int) -> SinkSubject:
    """A table of the database ``airflow`` of a server without passwords."""
    import psycopg

    name = f"public.t{uuid.uuid4().hex[:8]}"
    address: dict[str, Any] = {"host": host, "port": port, "user": "airflow", "dbname": "airflow"}
    with psycopg.connect(**address) as session:
        session.execute(f"CREATE TABLE {name} (message_id text NOT NULL, n bigint)")

    def read() -> list[str]:
        with psycopg.connect(**address) as session:
            rows = session.execute(f"SELECT message_id FROM {name}")
            return [row[0] for row in rows]

    connection = {"host": host, "port": port, "login": "airflow", "schema": "airflow"}
    env = SinkEnv(connections=Connections(connection))
    return SinkSubject(PostgresTable(table=name), read, env)


class SparkClient(SinkClient):
    """A client in a Spark driver that takes Arrow tables."""

    def __init__(self, sink: Any, env: SinkEnv) -> None:
        self.session = spark_session().newSession()
        self.client = sink.open_spark(self.session, env)

    def commit(self, rows: Any, commit: Commit) -> None:
        self.client.commit(self.session.createDataFrame(rows), commit)

    def landed(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        landed: Mapping[str, int] = self.client.landed(commit_ids)
        return landed

    def rule_out(self, commit_ids: Collection[str]) -> Mapping[str, int]:
        landed: Mapping[str, int] = self.client.rule_out(commit_ids)
        return landed


@dataclass(frozen=True)
class SparkSubject(SinkSubject):
    """Opens clients in a Spark driver: all of them, or each second one in Python.

    :param mixed: Whether the others are in Python, as a settlement's is.
    """

    mixed: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "_kinds", cycle([True, not self.mixed]))

    def open(self) -> SinkClient:
        on_spark = next(self._kinds)  # type: ignore[attr-defined]
        return SparkClient(self.sink, self.env) if on_spark else super().open()


def main(kind: str, given: dict[str, Any]) -> None:
    """Commits each id that standard input has, in another process."""
    sink = SINKS[kind](**given["options"])
    env = SinkEnv(connections=Connections(given["connection"]))
    client = SparkClient(sink, env) if given["spark"] else sink.open(env)
    print("ready", flush=True)
    for line in sys.stdin:
        commit_id = line.strip()
        print("begun", flush=True)
        try:
            commit_rows(client, rows_of(commit_id), commit_of(commit_id))
            print("landed", flush=True)
        except LeaseLapsed:
            print("refused", flush=True)
        except SinkError as error:
            print(f"failed: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
