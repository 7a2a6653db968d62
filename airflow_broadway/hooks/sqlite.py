"""The connection that names an embedded queue's file."""

from __future__ import annotations

from typing import Any

from airflow.providers.common.compat.sdk import BaseHook

from airflow_broadway.adapters.connections import connection_of
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.producers.sqlite.producer import DEFAULT_CONNECTION, path_of
from airflow_broadway.producers.sqlite.queue import SqliteQueue

__all__ = ["BroadwaySqliteHook"]


class BroadwaySqliteHook(BaseHook):
    """Open embedded queues by an Airflow connection.

    The connection's host is the queue file: an absolute path on a disk that every worker shares,
    so one machine's.  See ``docs/embedded-queue.md``.

    :param broadway_sqlite_conn_id: The connection.
    """

    conn_name_attr = "broadway_sqlite_conn_id"
    default_conn_name = DEFAULT_CONNECTION
    conn_type = "broadway_sqlite"
    hook_name = "Broadway embedded queue (SQLite)"

    def __init__(self, broadway_sqlite_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.broadway_sqlite_conn_id = broadway_sqlite_conn_id

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """How the connection form differs from the standard one."""
        return {
            "hidden_fields": ["port", "schema", "login", "password", "extra"],
            "relabeling": {"host": "Queue file"},
            "placeholders": {"host": "/var/lib/airflow/queues.db"},
        }

    @property
    def path(self) -> str:
        """The queue file.

        :raises ConnectionMissing: If the connection names none.
        """
        found = self.get_connection(self.broadway_sqlite_conn_id)
        return path_of(connection_of(self.broadway_sqlite_conn_id, found))

    def get_conn(self) -> str:
        """The queue file's path: what a connection of this type comes down to."""
        return self.path

    def get_queue(self, name: str) -> SqliteQueue:
        """The queue of that name in the file; nothing is opened before its first call."""
        return SqliteQueue(self.path, name)

    def test_connection(self) -> tuple[bool, str]:
        """Whether the queue file can be used, and why not."""
        try:
            with self.get_queue("test") as queue:
                made = queue.names() is not None
        except BroadwayError as error:
            return False, str(error)
        return True, "The queue file is in order." if made else "The first message makes the file."
