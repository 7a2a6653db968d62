"""Airflow's connections, as producers know them."""

from __future__ import annotations

from typing import Any

from airflow.providers.common.compat.sdk import AirflowNotFoundException, BaseHook

from airflow_broadway.core.custody.producer import Connection
from airflow_broadway.core.errors import ConnectionMissing


class AirflowConnections:
    """Airflow's connections, each looked up once.

    Once, because lease renewers use them from threads, and a task's channel to Airflow is for its
    main thread.
    """

    def __init__(self) -> None:
        self._known: dict[str, Connection] = {}

    def get(self, conn_id: str) -> Connection:
        """The connection of that id.

        :raises ConnectionMissing: If Airflow has none.
        """
        if conn_id not in self._known:
            self._known[conn_id] = self._look_up(conn_id)
        return self._known[conn_id]

    @staticmethod
    def _look_up(conn_id: str) -> Connection:
        try:
            found = BaseHook.get_connection(conn_id)
        except AirflowNotFoundException:
            raise ConnectionMissing(
                f"the Airflow connection {conn_id!r} is not defined; add it under Admin →"
                f" Connections, or set the variable AIRFLOW_CONN_{conn_id.upper()}"
            ) from None
        return connection_of(conn_id, found)


def connection_of(conn_id: str, found: Any) -> Connection:
    """The connection that an Airflow ``Connection`` describes."""
    return Connection(
        conn_id=conn_id,
        conn_type=found.conn_type or "",
        host=found.host or "",
        port=found.port,
        login=found.login or "",
        password=found.password or "",
        schema=found.schema or "",
        extra=found.extra_dejson,
    )
