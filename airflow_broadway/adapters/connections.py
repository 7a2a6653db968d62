"""Resolves Airflow's connections for producers."""

from __future__ import annotations

from typing import Any

from airflow.providers.common.compat.sdk import AirflowNotFoundException, BaseHook

from airflow_broadway.core.errors import ConnectionMissing
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.get_provider_info import get_provider_info


class AirflowConnections:
    """Airflow's connections, each looked up once.

    Cached because lease renewers use them from threads, and a task's channel to Airflow may be used
    by its main thread only.
    """

    def __init__(self) -> None:
        self._known: dict[str, Connection] = {}

    def get(self, conn_id: str) -> Connection:
        """Returns the connection with that id.

        :raises ConnectionMissing: If Airflow has none.
        """
        if conn_id not in self._known:
            try:
                connection = BaseHook.get_connection(conn_id)
            except AirflowNotFoundException:
                raise ConnectionMissing(
                    f"the Airflow connection {conn_id!r} is not defined; add it under Admin →"
                    f" Connections, or set the variable AIRFLOW_CONN_{conn_id.upper()}"
                ) from None
            self._known[conn_id] = connection_of(conn_id, connection)
        return self._known[conn_id]


def connection_of(conn_id: str, connection: Any) -> Connection:
    """Converts an Airflow ``Connection``."""
    return Connection(
        conn_id=conn_id,
        conn_type=connection.conn_type or "",
        host=connection.host or "",
        port=connection.port,
        login=connection.login or "",
        password=connection.password or "",
        schema=connection.schema or "",
        extra=connection.extra_dejson,
    )


def form_of(conn_type: str) -> dict[str, Any]:
    """Returns how the form of a connection type differs from the standard one, for its hook."""
    entries = get_provider_info()["connection-types"]
    entry = next(entry for entry in entries if entry["connection-type"] == conn_type)
    return {name.replace("-", "_"): value for name, value in entry["ui-field-behaviour"].items()}
