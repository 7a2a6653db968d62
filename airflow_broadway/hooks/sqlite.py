"""The hook of connections to an embedded queue's file."""

from __future__ import annotations

from typing import Any

from airflow.providers.common.compat.sdk import BaseHook

from airflow_broadway.adapters.connections import connection_of, form_of
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.producers.sqlite.producer import DEFAULT_CONNECTION, path_of
from airflow_broadway.producers.sqlite.queue import SqliteQueue

__all__ = ["BroadwaySqliteHook"]


class BroadwaySqliteHook(BaseHook):
    """Opens embedded queues by an Airflow connection.

    The connection's host is the queue file: an absolute path on a disk that every worker shares,
    which means a single machine.  See ``docs/embedded-queue.md``.

    :param broadway_sqlite_conn_id: The connection id.
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
        """Returns the differences of the connection form from the standard one."""
        return form_of(cls.conn_type)

    @property
    def path(self) -> str:
        """The queue file's path.

        :raises ConnectionMissing: If the connection has none.
        """
        connection = self.get_connection(self.broadway_sqlite_conn_id)
        return path_of(connection_of(self.broadway_sqlite_conn_id, connection))

    def get_conn(self) -> str:
        """Returns the queue file's path."""
        return self.path

    def get_queue(self, name: str) -> SqliteQueue:
        """Returns the queue of that name in the file; the file is opened on its first call."""
        return SqliteQueue(self.path, name)

    def test_connection(self) -> tuple[bool, str]:
        """Returns whether the queue file is usable, and the reason if not."""
        try:
            with self.get_queue("test") as queue:
                exists = queue.names() is not None
        except BroadwayError as error:
            return False, str(error)
        return True, "The queue file is in order." if exists else "The first message creates it."
