"""Airflow connections, as producers and sinks see them; outside Airflow there may be none.

A Spark driver gets those that its sinks name through its environment, never its command line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

from airflow_broadway.core.errors import ConnectionMissing

#: The environment variable of a Spark driver with connections as JSON; may hold secrets.
VARIABLE: Final = "AIRFLOW_BROADWAY_CONNECTIONS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """An Airflow connection's fields; ``password`` and ``extra`` never appear in a ``repr``."""

    conn_id: str
    conn_type: str = ""
    host: str = ""
    port: int | None = None
    login: str = ""
    password: str = field(default="", repr=False)
    schema: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)


class Connections(Protocol):
    """Resolves connection ids at run time; in a task, from Airflow."""

    def get(self, conn_id: str) -> Connection:
        """Returns the connection with that id.

        :raises ConnectionMissing: If there is none.
        """


class NoConnections:
    """Resolves no connection; the default outside Airflow."""

    def get(self, conn_id: str) -> Connection:
        raise ConnectionMissing(
            f"the connection {conn_id!r} is not defined: outside Airflow pass `connections=` with a"
            " mapping's lookup, or give the producer its address as an option"
        )


class EnvironmentConnections:
    """Resolves the connections in the environment of a Spark driver."""

    def get(self, conn_id: str) -> Connection:
        known: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
        try:
            return Connection(**known[conn_id])
        except KeyError:
            raise ConnectionMissing(
                f"the connection {conn_id!r} was not handed to this Spark driver: in cluster mode"
                f" set the driver's variable {VARIABLE} to a JSON object of connections by id, from"
                " a secret of the cluster"
            ) from None


def to_variable(connections: Connections, conn_ids: Iterable[str]) -> dict[str, str]:
    """Returns the environment variable with some connections; empty without any.

    :raises ConnectionMissing: If one is not defined.
    """
    known = {conn_id: asdict(connections.get(conn_id)) for conn_id in conn_ids}
    return {VARIABLE: json.dumps(known)} if known else {}
