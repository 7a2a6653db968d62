"""The queues of this package for ``MessageQueueTrigger`` of Airflow's provider common.messaging.

Unlike other providers' triggers these receive no message: they watch the backlog, and the run that
they start receives.
"""

from __future__ import annotations

from typing import Any, ClassVar

from airflow.providers.common.compat.sdk import AirflowOptionalProviderFeatureException

try:
    from airflow.providers.common.messaging.providers.base_provider import BaseMessageQueueProvider
except ImportError as error:
    raise AirflowOptionalProviderFeatureException(
        "MessageQueueTrigger needs Airflow's provider common.messaging:"
        " pip install 'airflow-broadway[messaging]'"
    ) from error

from airflow_broadway.adapters.assets import queue_producer, split_queue_uri
from airflow_broadway.triggers.backlog import BroadwayBacklogTrigger

__all__ = ["EmbeddedQueueProvider", "RabbitMQQueueProvider"]


class _QueueTrigger(BroadwayBacklogTrigger):
    """A backlog trigger for a queue instead of a pipeline; stored as its base class.

    :param queue_name: The queue.
    :param dag_id: The Dag that drains the queue.
    :param options: Other arguments of :class:`BroadwayBacklogTrigger`, of which ``min_messages`` is
        1 if no bound is set, and options of the queue's producer, such as ``conn_id``.
    """

    _scheme: ClassVar[str]

    def __init__(self, *, queue_name: str, dag_id: str, **options: Any) -> None:
        names = ("min_messages", "max_age", "poke_interval", "max_runs", "staging")
        watch = {name: options.pop(name) for name in names if name in options}
        if not watch.keys() & {"min_messages", "max_age"}:
            watch["min_messages"] = 1
        super().__init__(
            queue_producer(self._scheme, queue_name, **options), dag_id=dag_id, **watch
        )

    def serialize(self) -> tuple[str, dict[str, Any]]:
        path = f"{BroadwayBacklogTrigger.__module__}.{BroadwayBacklogTrigger.__qualname__}"
        return path, super().serialize()[1]


class _RabbitMQTrigger(_QueueTrigger):
    _scheme = "broadway+rabbitmq"


class _EmbeddedTrigger(_QueueTrigger):
    _scheme = "broadway+sqlite"


_TRIGGERS = {trigger._scheme: trigger for trigger in (_RabbitMQTrigger, _EmbeddedTrigger)}


class _QueueProvider(BaseMessageQueueProvider):
    def queue_matches(self, queue: str) -> bool:
        return queue.startswith(f"{self.scheme}://")

    def trigger_class(self) -> type[BroadwayBacklogTrigger]:
        return _TRIGGERS[str(self.scheme)]

    def trigger_kwargs(self, queue: str, **kwargs: Any) -> dict[str, str]:
        return split_queue_uri(queue)


class RabbitMQQueueProvider(_QueueProvider):
    """RabbitMQ's queues: ``scheme="broadway+rabbitmq"``, and URIs ``scheme://conn_id/queue``."""

    scheme = "broadway+rabbitmq"


class EmbeddedQueueProvider(_QueueProvider):
    """Embedded queues: ``scheme="broadway+sqlite"``, and URIs ``scheme://conn_id/queue``."""

    scheme = "broadway+sqlite"
