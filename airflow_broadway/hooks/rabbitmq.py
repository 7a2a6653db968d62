"""The hook of RabbitMQ connections."""

from __future__ import annotations

from typing import Any

from airflow.providers.common.compat.sdk import BaseHook

from airflow_broadway.adapters.connections import connection_of, form_of
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.producers.rabbitmq.amqp.address import Address, address_of
from airflow_broadway.producers.rabbitmq.options import DEFAULT_CONNECTION

__all__ = ["RabbitMQHook"]


class RabbitMQHook(BaseHook):
    """Opens RabbitMQ by an Airflow connection; see ``docs/rabbitmq.md``.

    The host may list several, the schema is the virtual host, and the form has fields for the most
    frequent extras.

    :param rabbitmq_conn_id: The connection id.
    """

    conn_name_attr = "rabbitmq_conn_id"
    default_conn_name = DEFAULT_CONNECTION
    conn_type = "rabbitmq"
    hook_name = "RabbitMQ"

    def __init__(self, rabbitmq_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rabbitmq_conn_id = rabbitmq_conn_id

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """Returns the differences of the connection form from the standard one."""
        return form_of(cls.conn_type)

    @property
    def address(self) -> Address:
        """The broker's address; its password is omitted from its ``repr`` and texts.

        :raises ConnectionMissing: If the connection lacks a required field.
        """
        connection = self.get_connection(self.rabbitmq_conn_id)
        return address_of(
            connection_of(self.rabbitmq_conn_id, connection),
            name=f"airflow hook {self.rabbitmq_conn_id}",
        )

    def get_conn(self) -> Any:
        """Returns a ``pika.BlockingConnection``; close it when done."""
        import pika

        return pika.BlockingConnection([host.parameters() for host in self.address.hosts()])

    def test_connection(self) -> tuple[bool, str]:
        """Returns whether a login succeeds, and the reason if not."""
        from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread

        try:
            connection = ConnectionThread.to(self.address)
        except BroadwayError as error:
            return False, str(error)
        properties = connection.raw.server_properties or {}
        connection.close()
        return (
            True,
            f"RabbitMQ {properties.get('version', '')} answers at {connection.address.netloc}.",
        )
