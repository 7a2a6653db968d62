"""Queues and tables as Airflow assets: their URIs, and the OpenLineage datasets of these.

A queue is ``broadway+rabbitmq://<conn_id>/<queue>`` or ``broadway+sqlite://<conn_id>/<queue>``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, quote, unquote, urlsplit

from airflow.sdk import Asset

from airflow_broadway import producers
from airflow_broadway.adapters.connections import AirflowConnections
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.model.connections import Connections

if TYPE_CHECKING:
    from airflow.providers.common.compat.openlineage.facet import Dataset

#: URI scheme → the producer class of its queues.
QUEUES: Final = {"broadway+rabbitmq": "RabbitMQProducer", "broadway+sqlite": "SqliteProducer"}


def queue_producer(scheme: str, queue_name: str, **options: Any) -> Producer:
    """Returns a producer with which a queue's depth is read.

    :raises OptionsError: If an option breaks its rule.
    """
    cls = getattr(producers, QUEUES[scheme])
    producer: Producer = cls(**{"queue": queue_name, "on_failure": "retry", **options})
    return producer


def split_queue_uri(uri: str) -> dict[str, str]:
    """Returns ``queue_name`` and ``conn_id`` of a queue's URI.

    :raises ValueError: If it names no connection or no queue.
    """
    parts = sanitize_uri(urlsplit(uri))
    return {"queue_name": unquote(parts.path[1:]), "conn_id": parts.netloc}


def sanitize_uri(uri: SplitResult) -> SplitResult:
    """Checks that a URI has an authority and a path: a connection and a queue or table.

    :raises ValueError: Otherwise.
    """
    if not uri.netloc or not uri.path.strip("/"):
        owner = "catalog" if uri.scheme == "iceberg" else "conn_id"
        raise ValueError(f"URI format {uri.scheme}://{owner}/name lacks a part: {uri.geturl()!r}")
    return uri


def create_asset(
    *, scheme: str, conn_id: str, queue: str, extra: dict[str, Any] | None = None
) -> Asset:
    """Returns the asset of a queue.

    :param scheme: ``"broadway+rabbitmq"`` or ``"broadway+sqlite"``.
    """
    return Asset(uri=f"{scheme}://{conn_id}/{quote(queue, safe='')}", extra=extra)


def convert_asset_to_openlineage(asset: Asset, lineage_context: Any) -> Dataset:
    """Converts the asset of a queue or table to its dataset; makes no request to a broker.

    :raises BroadwayError: If its connection is missing.
    """
    from airflow.providers.common.compat.openlineage.facet import Dataset

    namespace, name = dataset_of(asset.uri, AirflowConnections())
    return Dataset(namespace=namespace, name=name)


def dataset_of(uri: str, connections: Connections) -> tuple[str, str]:
    """Returns namespace and name of a queue's or table's dataset, as OpenLineage names them.

    :raises BroadwayError: If its connection is missing.
    """
    parts = urlsplit(uri)
    if parts.scheme in QUEUES:
        producer = queue_producer(parts.scheme, **split_queue_uri(uri))
        return producer.datasets(ProducerEnv(connections=connections))[0]
    if parts.scheme == "x-postgres":
        connection = connections.get(parts.netloc)
        namespace = f"postgres://{connection.host}:{connection.port or 5432}"
        return namespace, f"{connection.schema}.{parts.path[1:].replace('/', '.')}"
    if parts.scheme == "iceberg":
        return f"iceberg://{parts.netloc}", parts.path[1:].replace("/", ".")
    if not parts.netloc:
        return parts.scheme, parts.path
    return f"{parts.scheme}://{parts.netloc}", parts.path[1:]
