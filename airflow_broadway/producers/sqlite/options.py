"""The options of the embedded queue's producer, and the file that a connection names."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final

from airflow_broadway.core.custody.producer import Connection, Producer
from airflow_broadway.core.errors import ConnectionMissing, OptionsError
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import AUTO, CONN_ID, SECONDS, TEXT, Rule

#: The kind of the queue's leases.
KIND: Final = "sqlite"
#: The connection that names the queue file where no path is given.
DEFAULT_CONNECTION = "broadway_sqlite_default"

#: Types of connections that name a file in their host.
_TYPES = ("broadway_sqlite", "sqlite", "generic", "")

_ABSOLUTE = Rule(
    "an absolute path, the same file for every task",
    lambda v: isinstance(v, str) and Path(v).expanduser().is_absolute(),
)


@options
class SqliteOptions(Producer):
    """The options of :class:`~airflow_broadway.producers.sqlite.SqliteProducer`."""

    kind: ClassVar[str] = KIND
    local_clock: ClassVar[bool] = True
    sent_at: ClassVar[tuple[str, ...]] = ("enqueued_at",)

    queue: str = option(rule=TEXT, doc="The queue's name in its file.")
    path: str | None = option(
        default=None,
        rule=_ABSOLUTE.or_none(),
        doc="The queue file: an absolute path, on a disk of this machine.  Instead of ``conn_id``.",
    )
    conn_id: str | None = option(
        default=AUTO,
        rule=CONN_ID.or_none(),
        doc="The Airflow connection whose host, or extra ``path``, is the queue file;"
        f" ``{DEFAULT_CONNECTION}`` unless ``path`` is given.",
    )
    busy_timeout: float = option(
        default=30.0, rule=SECONDS, doc="Seconds to wait while another process writes to the file."
    )

    def _resolve(self) -> None:
        super()._resolve()
        self._default("conn_id", DEFAULT_CONNECTION if self.path is None else None)
        if self.path is not None and self.conn_id is not None:
            raise OptionsError(
                "SqliteProducer.conn_id", "nothing beside 'path': one of the two", self.conn_id
            )
        if self.path is None and self.conn_id is None:
            raise OptionsError.missing(
                "SqliteProducer.path",
                'SqliteProducer(path="/data/queue.db", …), or the id of a connection as conn_id',
            )


def path_of(connection: Connection) -> str:
    """The queue file that a connection names, in its host or in the extra ``path``.

    :raises ConnectionMissing: If it names none, or two, or is of another service.
    """
    shown = f"the connection {connection.conn_id!r}"
    if connection.conn_type not in _TYPES:
        raise ConnectionMissing(
            f"{shown} is of type {connection.conn_type!r}; an embedded queue needs one of type"
            " 'broadway_sqlite', with the path of the queue file as its host"
        )
    extra = connection.extra.get("path") or ""
    if connection.host and extra and connection.host != extra:
        raise ConnectionMissing(f"{shown} names two files, as host and as extra 'path': keep one")
    path = connection.host or extra
    if not _ABSOLUTE.holds(path):
        raise ConnectionMissing(
            f"{shown} names no queue file: its host must be an absolute path, got: {path!r}"
        )
    return str(path)
