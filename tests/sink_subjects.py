"""Empty tables of each sink, for its tests."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import Any

from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.core.formats.commits import commit_rows
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.core.model.sink import SinkEnv, SinkError
from airflow_broadway.sinks import DeltaTable, PostgresTable
from airflow_broadway.testing.sinks import SinkSubject, commit_of, rows_of

SINKS: dict[str, Any] = {"delta": DeltaTable, "postgres": PostgresTable}


class _Connections:
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
    env = SinkEnv(connections=_Connections(connection))
    return SinkSubject(PostgresTable(table=name), read, env)


def main(kind: str, given: dict[str, Any]) -> None:
    """Commits each id that standard input has, in another process."""
    sink = SINKS[kind](**given["options"])
    client = sink.open(SinkEnv(connections=_Connections(given["connection"])))
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
