"""Which ids a line of the log names, by structlog's own processor, as Airflow's log has it."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import structlog

from airflow_broadway import Batcher, Message, Processors
from airflow_broadway.core.custody.lease_renewer import LeaseRenewer
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.core.log_context import ids_now, keep_ids, log_ids, log_plainly
from airflow_broadway.core.model.acks import Scope, _scope
from airflow_broadway.core.stages.worker_pool import WorkerPool
from airflow_broadway.testing import DummyProducer
from tests.unit.core.custody.test_lease_renewer import LEASE
from tests.unit.core.stages._processes import InProcesses
from tests.unit.logged import logged
from tests.unit.passing import Passing

log = logging.getLogger("user")


@pytest.fixture
def lines():
    """Collects the log lines of a task of the run ``manual__1``."""
    with logged(run_id="manual__1") as kept:
        yield kept


class Logging(Passing):
    producer = DummyProducer()
    processors = Processors(concurrency=1)
    batchers = {"default": Batcher(engine="python", batch_size=2)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        log.info("message %s", message.message_id)
        if message.data == "bad":
            raise ValueError("bad")
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        log.info("batch %s", batch_info.batch_id)
        if messages[0].data == "worse":
            raise ValueError("worse")
        return messages


class InThreads(Logging):
    processors = Processors(concurrency=2)
    batchers = {"default": Batcher(engine="python", batch_size=2, concurrency=2)}


@pytest.mark.parametrize("pipeline", [Logging, InThreads])
def test_log_lines_name_the_current_message_or_batch(pipeline, lines):
    pipeline().run_local(range(4))

    run = {"run_id": "manual__1"}
    for number in range(4):
        name = f"given-{number}"
        assert lines.of(f"message {name}") == [{**run, "message_id": name}]
    batches = [(line, ids) for line, ids in lines.records if line.startswith("batch ")]
    assert len(batches) == 2
    for line, ids in batches:
        assert ids == {**run, "batcher": "default", "batch_id": line.removeprefix("batch ")}
    # And nothing is left of it
    assert ids_now() == {"run_id": "manual__1"}


def test_failure_names_its_messages(lines):
    Logging().run_local(["bad", "worse", "worse"])

    (one,) = lines.of("Logging.handle_message failed message 'given-0': ValueError: bad")
    assert one["message_id"] == "given-0"
    text = "Logging.handle_batch failed 2 messages ('given-1', 'given-2'): ValueError: worse"
    (several,) = lines.of(text)
    assert several["batch_id"]
    assert "message_id" not in several


def test_last_message_is_not_named_after_its_chunk(lines):
    class Whole(Logging):
        def handle_failed(self, messages, context):
            log.info("failed")
            return messages

    Whole().run_local(["bad"])

    (line,) = lines.of("failed")
    assert "message_id" not in line


def test_worker_thread_names_the_run(lines):
    pool: WorkerPool[int, None] = WorkerPool([lambda piece: log.info("piece %d", piece)])
    pool.put(1)
    assert pool.wait(10)
    pool.close()

    assert lines.of("piece 1") == [{"run_id": "manual__1"}]


def test_lease_renewer_thread_names_the_run(lines):
    tried = threading.Event()

    def custodian():
        tried.set()
        raise ProducerUnavailable("away")

    with LeaseRenewer(custodian, 60.0, lambda: [LEASE], at_once=True):
        assert tried.wait(10)

    assert lines.of("could not renew leases yet: away") == [{"run_id": "manual__1"}]


def test_kept_ids_carry_nothing_else_of_a_callback():
    results: list[Any] = []
    with Scope("batch"), log_ids(batch_id="b1", message_id=None):
        kept = keep_ids(lambda: results.append((ids_now(), _scope.get())))
    thread = threading.Thread(target=kept)
    thread.start()
    thread.join(10)

    assert results == [({"batch_id": "b1"}, None)]


def test_nested_ids_end_with_their_block():
    with log_ids(generation="g1", message_id="m1"):
        with log_ids(message_id=None, batch_id="b1"):
            assert ids_now() == {"generation": "g1", "batch_id": "b1"}
        assert ids_now() == {"generation": "g1", "message_id": "m1"}
    assert ids_now() == {}


def test_plain_line_ends_with_escaped_ids(monkeypatch, capsys):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    log_plainly("%(levelname)s %(message)s")

    log.info("without")
    with log_ids(run_id="manual__1", message_id="a\nERROR forged"):
        try:
            raise ValueError("boom")
        except ValueError:
            log.exception("with")

    without, line, *trace = capsys.readouterr().err.splitlines()
    assert without == "INFO without"
    assert line == "ERROR with [run_id='manual__1' message_id='a\\nERROR forged']"
    assert trace[-1] == "ValueError: boom"


def test_child_process_names_the_run_and_the_message(capfd):
    with structlog.contextvars.bound_contextvars(dag_id="shop", run_id="manual__1"):
        InProcesses().run_local(["odd"])

    (line,) = [line for line in capfd.readouterr().err.splitlines() if "failed message" in line]
    assert line.endswith(" [dag_id='shop' run_id='manual__1' message_id='given-0']")
