from __future__ import annotations

import shlex
from typing import Any

import pytest

from airflow_broadway.cli.app import main
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Delivery, Lease, QueueDepth, Settlement
from airflow_broadway.core.custody.verdicts import ACK
from airflow_broadway.core.errors import ConnectionMissing, OptionsError, ProducerError
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.core.model.options import override
from airflow_broadway.producers import SqliteProducer
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.testing.clock import ManualClock


class OneConnection:
    def __init__(self, **fields: Any) -> None:
        self._connection = Connection(conn_id="broadway_sqlite_default", **fields)

    def get(self, conn_id: str) -> Connection:
        assert conn_id == "broadway_sqlite_default"
        return self._connection


def env(**changes: Any) -> ProducerEnv:
    return ProducerEnv(clock=ManualClock(), **changes)


def test_path_defaults_to_connection():
    producer = SqliteProducer(queue="q")
    assert producer.conn_id == "broadway_sqlite_default"
    assert (producer.lease, producer.busy_timeout) == (900.0, 30.0)
    assert SqliteProducer(queue="q", path="/q.db").conn_id is None
    assert SqliteProducer(queue="q", conn_id="mine").path is None


def test_path_and_connection_are_exclusive():
    with pytest.raises(OptionsError) as error:
        SqliteProducer(queue="q", path="/q.db", conn_id="mine")
    assert str(error.value) == (
        "invalid value for option 'SqliteProducer.conn_id': expected no value with 'path': use one"
        " of the two, got: 'mine'"
    )
    missing = "required option 'SqliteProducer.path' not found; give it, such as Sqlite"
    with pytest.raises(OptionsError, match=missing):
        SqliteProducer(queue="q", conn_id=None)


def test_override_may_replace_connection_by_path():
    changed = override(SqliteProducer(queue="q"), {"path": "/q.db"}, "producer")

    assert (changed.path, changed.conn_id) == ("/q.db", None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "'SqliteProducer.queue' not found; give it, such as SqliteProducer(queue="),
        ({"queue": ""}, "'SqliteProducer.queue': expected a non-empty string, got: ''"),
        (
            {"queue": "q", "path": "q.db"},
            "expected an absolute path, the same file for every task or None, got: 'q.db'",
        ),
        ({"queue": "q", "pth": "/q.db"}, "did you mean 'path'?"),
        (
            {"queue": "q", "on_failure": "requeue"},
            "expected one of ['ack', 'dead_letter', 'noop', 'retry'], got: 'requeue'",
        ),
    ],
)
def test_invalid_option_is_named(options, text):
    with pytest.raises(OptionsError) as error:
        SqliteProducer(**options)

    assert text in str(error.value)


def test_template_is_checked_when_rendered():
    declared = SqliteProducer(queue="q-{{ var.value.env }}", path="{{ var.value.queue_file }}")

    assert declared.path == "{{ var.value.queue_file }}"
    with pytest.raises(OptionsError, match="an absolute path"):
        override(declared, {"path": "relative.db"}, "producer", rendered=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "/q.db"},
        {"extra": {"path": "/q.db"}},
        {"conn_type": "broadway_sqlite", "host": "/q.db", "extra": {"path": "/q.db"}},
    ],
)
def test_path_comes_from_host_or_extra(fields):
    queue = SqliteProducer(queue="q").open_queue(env(connections=OneConnection(**fields)))

    assert queue.path == "/q.db"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "names no queue file: its host must be an absolute path, got: ''"),
        ({"host": "localhost"}, "must be an absolute path, got: 'localhost'"),
        ({"host": "/a", "extra": {"path": "/b"}}, "names two files"),
        ({"conn_type": "postgres", "host": "/a"}, "is of type 'postgres'"),
    ],
)
def test_connection_without_file_is_error(fields, text):
    producer = SqliteProducer(queue="q")

    for use in (producer.source, producer.custodian, producer.depth):
        with pytest.raises(ConnectionMissing) as error:
            use(env(connections=OneConnection(**fields)))
        assert "the connection 'broadway_sqlite_default'" in str(error.value)
        assert text in str(error.value)


def test_missing_connection_is_error():
    with pytest.raises(ConnectionMissing, match="'broadway_sqlite_default' is not defined"):
        SqliteProducer(queue="q").source(env())


@pytest.fixture
def producer(tmp_path):
    path = str(tmp_path / "q.db")
    with SqliteQueue(path, "q", clock=ManualClock()) as queue:
        queue.send([b"a", b"b"])
    return SqliteProducer(queue="q", path=path)


def test_messages_carry_delivery_metadata(producer):
    source = producer.source(env(generation="g"))
    messages = source.receive(5, timeout=0.0)

    assert source.secure(messages) is messages
    for message in messages:
        assert message.acknowledger.ref == "g"
        assert message.acknowledger.data == Delivery()
    source.close()


def test_receiving_moves_deadline(producer):
    clock = ManualClock()
    source = producer.source(ProducerEnv(generation="g", clock=clock))
    first = source.lease.deadline
    clock.advance(100.0)
    source.receive(1, timeout=0.0)
    assert (source.lease.deadline - first).total_seconds() == 100.0
    clock.advance(100.0)
    source.receive(1, timeout=0.0)
    second = source.lease.deadline
    assert (second - first).total_seconds() == 200.0

    # Without new messages nothing is renewed.
    clock.advance(100.0)
    assert source.receive(1, timeout=1.0) == []
    assert source.lease.deadline == second
    source.close()


def test_waiting_ends_on_arrival(producer):
    with producer.open_queue(env()) as queue:
        queue.receive("cleared", 10)
        queue.settle("cleared", Settlement(rest=ACK))

        class Busy(ManualClock):
            def sleep(self, seconds: float) -> None:
                super().sleep(seconds)
                if self.monotonic() > 3.0:
                    queue.send([b"at last"])

        clock = Busy()
        source = producer.source(ProducerEnv(generation="g", clock=clock))
        messages = source.receive(5, timeout=60.0)
        source.close()

    assert b"at last" in [message.data for message in messages]
    assert clock.monotonic() < 5.0


def test_lease_of_another_queue_is_refused(producer):
    source = producer.source(env(generation="g"))
    source.receive(1, timeout=0.0)
    lease = source.lease
    source.close()
    other = SqliteProducer(queue="other", path=producer.path).custodian(env())

    for use in (other.renew, other.holds):
        with pytest.raises(ProducerError, match="is of sqlite queue 'q', and this producer's"):
            use(lease)
    with pytest.raises(ProducerError, match="give both halves of the run the same options"):
        other.settle(Lease.from_json({**lease.to_json(), "kind": "sqs"}), Settlement(rest=ACK))
    other.close()


def test_depth_and_open_leases(producer):
    source = producer.source(env(generation="g", owner={"run_id": "r"}))
    source.receive(1, timeout=0.0)

    assert producer.depth(env()) == QueueDepth(1, 0, 1, 0, 0.0)
    with producer.open_queue(env()) as queue:
        [record] = queue.leases()
    lease = record.lease
    assert (lease.kind, lease.generation, lease.owner) == ("sqlite", "g", {"run_id": "r"})
    assert lease == source.lease
    source.close()


def test_parsing_pipeline_opens_nothing(tmp_path):
    SqliteProducer(queue="q", path=str(tmp_path / "missing" / "q.db"))

    assert list(tmp_path.iterdir()) == []


def test_missing_file_error_names_create_command(tmp_path):
    path = tmp_path / "mis typed.db"
    producer = SqliteProducer(queue="orders", path=str(path))

    with pytest.raises(ProducerError) as raised:
        producer.source(ProducerEnv())

    command = f"airflow-broadway queue create --path '{path}' --queue orders"
    assert str(raised.value) == (
        f"there is no queue file {path}, and a run receives only from a queue that exists: correct"
        f" the path, send to the queue, or create it with `{command}`"
    )
    # Neither the refusal nor a depth creates it.
    assert producer.depth(ProducerEnv()) is None
    assert list(tmp_path.iterdir()) == []
    assert main(shlex.split(command)[1:]) == 0
    producer.source(ProducerEnv()).close()


def test_unknown_queue_error_lists_names(tmp_path):
    path = tmp_path / "q.db"
    producer = SqliteProducer(queue="ordres", path=str(path))
    SqliteQueue(path, "orders").send([b"a"])

    with pytest.raises(ProducerError, match=r"has no queue 'ordres'; it has \['orders'\]: correct"):
        producer.source(ProducerEnv())

    SqliteProducer(queue="orders", path=str(path)).source(ProducerEnv()).close()
    for _ in range(2):
        SqliteQueue(path, "ordres").create()
        producer.source(ProducerEnv()).close()
    assert SqliteQueue(path, "ordres").names() == ["orders", "ordres"]
