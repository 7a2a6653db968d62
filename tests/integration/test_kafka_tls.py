"""Kafka over TLS with passwords and ACLs; and damaged batches, through a proxy."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.testing.harness import settlement_of
from tests.kafka_proxy import FETCH, KafkaProxy
from tests.kafka_server import PASSWORD, USER, ApacheKafka

pytestmark = pytest.mark.broker


class TopicClient:
    """A topic of ten messages, and a producer that connects to it at an address.

    :param fields: Fields of the connection.
    """

    def __init__(self, kafka: ApacheKafka, address: str, folder: Path, **fields: Any) -> None:
        self.topic = kafka.topic()
        kafka.topic(f"{self.topic}-dlt")
        kafka.fill(self.topic, [b"%0500d" % number for number in range(10)])
        self._extra = {"bootstrap.servers": address, **fields.pop("extra", {})}
        self._fields = fields
        self._folder = folder
        self.producer = KafkaProducer(
            group_id=f"group of {self.topic}",
            topics=[self.topic],
            offset_reset_policy="earliest",
            settings={"socket.timeout.ms": 2_000},
        )

    def get(self, conn_id: str) -> Connection:
        return Connection(conn_id=conn_id, conn_type="kafka", extra=self._extra, **self._fields)

    def drain(self) -> SettleReport:
        """A whole run."""
        env = ProducerEnv(
            generation=uuid.uuid4().hex, staging=f"file://{self._folder}", connections=self
        )
        source = self.producer.source(env)
        try:
            messages: list[Message] = []
            while portion := source.secure(source.receive(100, timeout=0.5)):
                messages += portion
            source.stop()
            lease = source.lease
        finally:
            source.close()
        custodian = self.producer.custodian(env)
        try:
            return custodian.settle(lease, settlement_of(messages))
        finally:
            custodian.close()

    def run_error(self) -> str:
        """Runs a producer that receives nothing; returns the error."""
        with pytest.raises(ProducerError) as raised:
            self.drain()
        assert PASSWORD not in str(raised.value)
        return str(raised.value)


def sasl_client(kafka, folder, password):
    extra = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "ssl.ca.location": str(kafka.authority.certificate),
    }
    return TopicClient(kafka, kafka.secure, folder, login=USER, password=password, extra=extra)


def test_a_run_with_tls_and_the_guides_acls(apache_kafka, tmp_path):
    client = sasl_client(apache_kafka, tmp_path, PASSWORD)

    assert "Read and Describe" in client.run_error()
    apache_kafka.allow("topic", client.topic, "read", "describe")
    apache_kafka.allow("group", client.producer.group_id, "read")
    apache_kafka.allow("topic", f"{client.topic}-dlt", "write", "describe")

    assert client.drain() == SettleReport(acked=10)
    assert client.drain() == SettleReport()


def test_a_wrong_password_is_one_clear_error_without_it(apache_kafka, tmp_path):
    client = sasl_client(apache_kafka, tmp_path, f"{PASSWORD} and more")

    assert "does not accept the credentials" in client.run_error()


def test_an_untrusted_certificate_is_reported_as_tls(apache_kafka, tmp_path):
    client = TopicClient(
        apache_kafka, apache_kafka.secure, tmp_path, extra={"security.protocol": "SSL"}
    )

    error = client.run_error()

    assert "TLS fails" in error
    assert "ssl.ca.location" in error


def test_a_client_without_tls_is_pointed_to_it(apache_kafka, tmp_path):
    assert "TLS or SASL" in TopicClient(apache_kafka, apache_kafka.secure, tmp_path).run_error()


def test_a_damaged_batch_ends_the_run_and_loses_nothing(apache_kafka, tmp_path):
    def damaged(kind: int, response: bytes) -> bytes:
        place = len(response) // 2
        if kind != FETCH or len(response) < 2_000:
            return response
        return response[:place] + bytes([response[place] ^ 0xFF]) + response[place + 1 :]

    with KafkaProxy(apache_kafka.bootstrap, change=damaged) as proxy:
        client = TopicClient(apache_kafka, proxy.bootstrap, tmp_path)
        assert "a batch of messages is damaged" in client.run_error()

        proxy.change = None

        assert client.drain() == SettleReport(acked=10)
