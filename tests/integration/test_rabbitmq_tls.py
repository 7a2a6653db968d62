"""TLS and memory alarms, at a RabbitMQ server of the tests' own."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import Blocked
from airflow_broadway.producers.rabbitmq.broker import standing_queues
from airflow_broadway.producers.rabbitmq.broker.checks import check_queues
from airflow_broadway.testing.contract import settlement_of
from tests.rabbitmq_fixtures import skip_without_own_server
from tests.rabbitmq_place import Place, manage
from tests.rabbitmq_server import RabbitServer, free_port
from tests.tls import Authority

pytestmark = [pytest.mark.broker, pytest.mark.slow]


@dataclass
class SecuredServer(RabbitServer):
    """A server that listens with TLS too, except for its management API."""

    tls_port: int = field(default_factory=free_port)

    @property
    def env(self) -> dict[str, str]:
        more = {"RABBITMQ_CONFIG_FILES": str(self.folder / "more")}
        return {**super().env, **more}

    def secure(self, authority: Authority) -> None:
        """Writes the settings of TLS, before the server starts."""
        certificate, key = authority.sign("server", "127.0.0.1", "broker.test")
        files = {"cacertfile": authority.certificate, "certfile": certificate, "keyfile": key}
        lines = [f"listeners.ssl.1 = 127.0.0.1:{self.tls_port}"]
        lines += [f"ssl_options.{name} = {file}" for name, file in files.items()]
        # A client certificate must be of this authority; it is not mandatory.
        lines += ["ssl_options.verify = verify_peer", "ssl_options.fail_if_no_peer_cert = false"]
        lines += ["auth_mechanisms.1 = PLAIN", "auth_mechanisms.2 = EXTERNAL"]
        lines += ["ssl_cert_login_from = common_name"]
        (self.folder / "more").mkdir(parents=True)
        (self.folder / "more" / "10-tls.conf").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority.make(tmp_path_factory.mktemp("authority"), "tests")


@pytest.fixture(scope="module")
def server(authority, tmp_path_factory):
    skip_without_own_server()
    result = SecuredServer(
        tmp_path_factory.mktemp("secured"),
        plugins="rabbitmq_management, rabbitmq_auth_mechanism_ssl",
    )
    result.secure(authority)
    result.run()
    with result:
        yield result


@pytest.fixture
def place(server, tmp_path, monkeypatch):
    monkeypatch.setattr(standing_queues, "_RELIABLE_AGE", 0.0)
    result = Place(server, tmp_path)
    result.declare()
    return result


# -- TLS -------------------------------------------------------------------------------------------


def tls_fields(place: Place, **tls: Any) -> dict[str, Any]:
    """Returns the fields of a connection with TLS."""
    assert isinstance(place.server, SecuredServer)
    return {"port": place.server.tls_port, "extra": {"tls": tls, "management_url": False}}


def test_a_run_with_tls_receives_and_settles(place, authority):
    place.send(b"1", b"2")
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit", on_failure="retry")
    env = place.env(**tls_fields(place, ca=str(authority.certificate)))

    source = producer.source(env)
    messages = place.take(source)
    custodian = producer.custodian(env)
    report = custodian.settle(source.lease, settlement_of(messages))
    custodian.close()
    source.close()

    assert [message.data for message in messages] == [b"1", b"2"]
    assert report == SettleReport(acked=2)


def test_an_untrusted_server_is_refused(place, tmp_path):
    untrusted = Authority.make(tmp_path, "other")
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit")

    for tls in ({"ca": str(untrusted.certificate)}, {}):
        with pytest.raises(
            ProducerError, match=r"TLS failed: .*CERTIFICATE_VERIFY_FAILED"
        ) as raised:
            producer.source(place.env(**tls_fields(place, **tls)))
        assert "\n" not in str(raised.value)
        assert not isinstance(raised.value, ProducerUnavailable)  # a retry would not help


def test_the_server_hostname_is_verified(place, authority):
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit")
    trusted = {"ca": str(authority.certificate)}

    with pytest.raises(ProducerError, match=r"TLS failed: .*ostname mismatch"):
        producer.source(place.env(**tls_fields(place, **trusted, server_name="elsewhere.test")))
    producer.source(place.env(**tls_fields(place, **trusted, server_name="broker.test"))).close()
    producer.source(place.env(**tls_fields(place, verify=False))).close()


def test_a_client_certificate_authenticates(place, authority):
    # Given a user without a password, whose name is that of a certificate
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit", on_failure="retry")
    place.send(b"1")

    def connection(name: str) -> dict[str, Any]:
        certificate, key = authority.sign(name, f"{name}.test")
        tls = {"tls_ca": authority.certificate, "tls_cert": certificate, "tls_key": key}
        extra = {name: str(file) for name, file in tls.items()}
        return {
            **tls_fields(place),
            "extra": {**extra, "auth_mechanism": "external", "management_url": False},
        }

    manage(place.server, "PUT", "users/airflow-cert", {"password_hash": "", "tags": ""})
    allowed = {"configure": ".*", "write": ".*", "read": ".*"}
    manage(place.server, "PUT", "permissions/%2F/airflow-cert", allowed)

    # When a run presents it, no login is needed
    source = producer.source(place.env(**connection("airflow-cert")))
    assert [message.data for message in place.take(source)] == [b"1"]
    source.close()

    # And an unknown user is refused
    with pytest.raises(ProducerError, match="refused the login by certificate"):
        producer.source(place.env(**connection("nobody")))


def test_an_unknown_client_certificate_is_refused(place, authority, tmp_path):
    untrusted = Authority.make(tmp_path, "other")
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit")

    def connection(signer: Authority) -> dict[str, Any]:
        certificate, key = signer.sign("client", "client.test")
        files = {"cert": str(certificate), "key": str(key)}
        return tls_fields(place, ca=str(authority.certificate), **files)

    producer.source(place.env(**connection(authority))).close()
    with pytest.raises(ProducerError, match=r"TLS failed: .*(?i:unknown.ca)"):
        producer.source(place.env(**connection(untrusted)))


def test_a_tls_mismatch_of_port_and_client_is_one_clear_error(place, authority):
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit", backoff_type="stop")
    with_tls = tls_fields(place, ca=str(authority.certificate))
    began = time.monotonic()

    with pytest.raises(ProducerError, match=r"TLS failed|cannot be reached"):
        producer.source(place.env(**{**with_tls, "port": place.port}))
    with pytest.raises(ProducerError, match="cannot be reached"):
        producer.source(place.env(port=with_tls["port"], extra={"timeout": 5}))

    assert time.monotonic() - began < 30


def test_the_management_api_uses_the_same_ca(place, authority, tmp_path):
    # The AMQP port has TLS too, which suffices to check which CA is trusted.
    untrusted = Authority.make(tmp_path, "other")
    assert isinstance(place.server, SecuredServer)
    url = f"https://127.0.0.1:{place.server.tls_port}"
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit")

    def check_with(ca: Path) -> str:
        extra = {"tls": {"ca": str(ca)}, "management_url": url}
        address = address_for(producer, place.env(extra=extra))
        connection: Any = SimpleNamespace(
            version="3.13.0", address=address, depth=lambda name: None
        )
        [note] = check_queues(connection, producer)
        return note.text

    assert "CERTIFICATE_VERIFY_FAILED" in check_with(untrusted.certificate)
    assert "CERTIFICATE_VERIFY_FAILED" not in check_with(authority.certificate)


# -- short of memory -------------------------------------------------------------------------------


def test_a_blocked_connection_waits_and_loses_nothing(place, caplog):
    # Given a run that has begun, as the broker runs short of memory
    place.send(*[b"%d" % number for number in range(20)])
    assert isinstance(place.server, SecuredServer)
    control = place.server.control
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit", on_failure="retry")
    source = producer.source(place.env(extra={"timeout": 3}))
    taken = [*source.secure(source.receive(5, timeout=2.0))]
    control("set_vm_memory_high_watermark", "absolute", "1MB")

    # When it continues, and the broker has memory again only after the timeout of a confirm
    recovery = threading.Timer(5.0, control, ("set_vm_memory_high_watermark", "absolute", "3GB"))
    recovery.start()
    began = time.monotonic()
    try:
        taken += place.take(source)
    finally:
        recovery.join()
        source.close()

    # Then it has waited, logged one warning, received all messages, and settles
    assert time.monotonic() - began > 4
    report = place.carry_out(source.lease, settlement_of(taken))
    assert sorted(int(message.data) for message in taken) == list(range(20))
    assert report == SettleReport(acked=20)
    blocked = [text for text in caplog.messages if "blocks this connection" in text]
    assert len(blocked) == 1


def test_a_connection_blocked_for_too_long_is_an_error_with_the_reason(place):
    place.send(b"1", b"2")
    assert isinstance(place.server, SecuredServer)
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit", on_failure="retry")
    env = place.env(extra={"blocked_connection_timeout": 3})
    source = producer.source(env)

    place.server.control("set_vm_memory_high_watermark", "absolute", "1MB")
    try:
        with pytest.raises(Blocked, match=r"short of memory or disk.* for 3 s: make room there"):
            source.receive(10, timeout=5.0)
    finally:
        source.close()
        place.server.control("set_vm_memory_high_watermark", "absolute", "3GB")

    assert [message.data for message in place.settle("g2")[0]] == [b"1", b"2"]
