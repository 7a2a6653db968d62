"""The end of a run during publishing: messages that it does not lease are visible immediately."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Batcher, Message, RateLimiting
from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE
from airflow_broadway.core.errors import BroadwayError, ProducerUnavailable, StagingError
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.engine import polls
from airflow_broadway.producers.engine.port import Received
from airflow_broadway.producers.engine.receipts import Receipts
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.runs.process import Process
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.testing import ManualClock
from tests.fake_sqs import URL, FakeSqs, client_error, installed
from tests.unit.passing import Passing
from tests.unit.producers.sqs.kit import FIFO, halves, options, process_of

#: The ways in which a run ends, and whether by an error.
WAYS = {
    "empty": False,
    "max_messages": False,
    "max_bytes": False,
    "max_seconds": False,
    "rate_limiting": False,
    "stopped": False,
    "callback": True,
    "transformer": True,
    "staging": True,
    "sqs": True,
}


class Clicks(Passing):
    producer = SqsProducer(queue_url=URL, conn_id=None, receive_interval=0.0)
    batchers = {"default": Batcher()}


class Killed(Clicks):
    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if message.position > 3:
            raise KeyboardInterrupt  # no failure of the message
        return message


def broken(message: Message) -> Message:
    if message.position > 3:
        raise KeyboardInterrupt
    return message


class Publishing:
    """A concurrent publisher: three more messages arrive with each receive."""

    def __init__(self, way: str, url: str) -> None:
        self.fake = FakeSqs(ManualClock())
        self.url = url
        self.sent = 0
        self.way = way
        self._receives = 0
        self._lock = threading.Lock()
        self.fake.answer = self._answer
        self.publish(40)

    def publish(self, count: int) -> None:
        for _ in range(count):
            self.fake.put([f"click {self.sent}"], url=self.url, group=f"g{self.sent % 7}")
            self.sent += 1

    def _answer(self, action: str, _: dict[str, Any]) -> Any:
        if action != "ReceiveMessage":
            return None
        with self._lock:
            self._receives += 1
            self.fake.clock.sleep(0.03)
            if self.way == "empty" and self._receives % 9 == 8:
                return {}
            if self.way == "sqs" and self._receives == 2:
                return client_error("ExpiredToken")
            if self._receives < 200:
                self.publish(3)
        return None

    def hidden(self) -> set[str]:
        """Returns the ids of invisible messages."""
        now = self.fake.clock.now().timestamp()
        known = self.fake.queue(self.url).known.values()
        return {message.key for message in known if message.visible > now}


@pytest.fixture(params=[URL, FIFO], ids=["standard", "fifo"])
def url(request):
    return str(request.param)


def process(
    publishing: Publishing, tmp_path: Path, concurrency: int, **more: Any
) -> tuple[Process, StagedRun]:
    way = publishing.way
    options: dict[str, Any] = {"queue_url": publishing.url, "receive_concurrency": concurrency}
    options |= more
    if way == "rate_limiting":
        options["rate_limiting"] = RateLimiting(allowed_messages=33, interval=1e6)
    if way == "transformer":
        options["transformer"] = broken
    pipeline = (Killed if way == "callback" else Clicks)(producer=options)
    budget = {
        "max_messages": Budget(max_messages=35),
        "max_bytes": Budget(max_bytes=300),
        "max_seconds": Budget(max_seconds=0.4),
        "rate_limiting": Budget(max_seconds=5.0),
    }.get(way, Budget(max_seconds=6.0))
    return process_of(publishing.fake, pipeline, tmp_path, budget)


def fail_portion(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Fails to write the n-th portion of receipts."""
    write, calls = Receipts.hold, [0]

    def failing(self: Receipts, *arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == number:
            raise StagingError("no room is left")
        write(self, *arguments)

    monkeypatch.setattr(Receipts, "hold", failing)


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("way", list(WAYS))
def test_every_end_of_run_hides_only_leased_messages(way, concurrency, url, tmp_path, monkeypatch):
    if way == "staging":
        fail_portion(monkeypatch, 2 if (url, concurrency) == (URL, 1) else 1)
    publishing = Publishing(way, url)
    task, staged = process(publishing, tmp_path, concurrency)
    if way == "stopped":
        task.stop("stopped")
    received: int | None = None
    with installed(publishing.fake):
        if WAYS[way]:
            with pytest.raises((BroadwayError, KeyboardInterrupt)):
                task.run()
        else:
            received = task.run()["received"]
        publishing.publish(5)

        # A failed run leases nothing; any other the messages of its manifest.
        leased = publishing.hidden()
        manifest: Manifest | None = staged.manifest("g")
        if manifest is None:
            assert (received, leased) == (None, set())
            assert publishing.fake.left(url) == publishing.sent
            return
        assert manifest.lease["state"]["messages"] == manifest.received == received == len(leased)
        assert staged_ids(staged, manifest) <= leased
        lease = staged.lease(staged.generation("g"))
        custodian = task.pipeline.producer.custodian(task.env)
        request = Settlement(
            rest=ACK,
            everything=lambda: (Entry(key, "", ACK) for key in leased),
            expected=len(leased),
        )
        assert custodian.settle(lease, request) == SettleReport(acked=len(leased))
        custodian.close()
    assert publishing.hidden() == set()
    assert publishing.fake.left(url) == publishing.sent - len(leased)


def staged_ids(staged: StagedRun, manifest: Manifest) -> set[str]:
    from airflow_broadway.staging.tables import ParquetFile

    ids: set[str] = set()
    for files in manifest.files.values():
        for path in files:
            with ParquetFile(staged.files, path) as file:
                for group in range(file.groups):
                    ids.update(file.read(group, ["message_id"])["message_id"].to_pylist())  # type: ignore[arg-type]
    return ids


# -------------------------------------------------------------------------- messages in flight


def test_unsecured_messages_are_released_and_not_counted(run):
    run.fake.put(["a", "b"])
    run.source.secure(run.source.receive(1, timeout=0))
    assert len(run.source.receive(1, timeout=0)) == 1  # the task ends before it is secured

    run.source.stop()
    run.source.close()

    assert run.fake.entries["ChangeMessageVisibility"] == 1
    assert run.source.lease.state["messages"] == 1
    assert run.fake.waiting() == ["b"]
    report = run.custodian.settle(run.source.lease, Settlement(rest=RELEASE))
    assert report == SettleReport(released=1)


def test_failed_release_is_repeated_on_close(run):
    run.fake.put([str(number) for number in range(30)])
    run.source.receive(10, timeout=0)
    run.fake.answers("ChangeMessageVisibility", client_error("ServiceUnavailable", status=503))
    run.source.stop()
    assert len(run.fake.waiting()) == 20
    run.fake.obey()

    run.source.close()

    assert len(run.fake.waiting()) == 30


@options(staged=True)
def test_late_receipt_is_written_before_lease(run):
    messages = run.take_new(["a"])
    queue = run.fake.queue()
    queue.ready.append(queue.known[messages[0].message_id])  # visible too early, as SQS allows
    raw = run.fake.receive()
    again = Received(raw["MessageId"], raw["ReceiptHandle"], raw)
    run.source._ready = [(run.clock.now().timestamp(), again)]

    run.source.stop()

    # The manifest is published: another process settles before this source is closed.
    assert run.other()._folder.durable
    run.source._folder.close(run.env.generation)
    assert run.settle(messages, by=run.other()) == SettleReport(acked=1)
    assert run.fake.left() == 0


def test_abandoned_receive_releases_messages(monkeypatch):
    monkeypatch.setattr(polls, "_RECEIVE_TIMEOUT", 0.05)
    with halves(receive_concurrency=2, wait_time_seconds=20) as run:
        polled, proceed = threading.Event(), threading.Event()

        def answer(_: object) -> None:
            polled.set()
            assert proceed.wait(timeout=30)

        run.fake.answers("ReceiveMessage", answer)
        run.fake.put(["late"])
        run.source._polls.want(10)
        assert polled.wait(timeout=30)
        pool = run.source._polls._pool
        assert pool is not None

        run.source.stop()
        assert run.fake.waiting() == ["late"]  # not received yet
        proceed.set()
        pool.shutdown(wait=True)

        assert run.fake.waiting() == ["late"]
        [late] = run.fake.queue().known.values()
        assert late.count == 1


@pytest.mark.parametrize("wait", [None, 0, 20], ids=["the queue's", "no", "20 s"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_stopped_run_does_not_wait_for_long_poll(concurrency, wait, monkeypatch):
    """Nor for a slow server: Airflow kills a task five seconds later."""
    monkeypatch.setattr(polls, "_STOPPING_TIMEOUT", 0.05)
    stopping, proceed = threading.Event(), threading.Event()
    waits: dict[str, Any] = {"receive_concurrency": concurrency, "wait_time_seconds": wait}
    with halves(stopping=stopping.is_set, **waits) as run:

        def answer(_: object) -> None:
            stopping.set()
            assert proceed.wait(timeout=20)

        run.fake.answers("ReceiveMessage", answer)
        run.fake.put(["late"])
        began = time.monotonic()

        assert list(run.source.receive(10, timeout=0)) == []
        pool = run.source._polls._pool
        assert pool is not None
        run.source.stop()
        run.source.close()

        assert time.monotonic() - began < 5
        assert run.source.lease.state["messages"] == 0
        proceed.set()
        pool.shutdown(wait=True)
        assert run.fake.waiting() == ["late"]
        [late] = run.fake.queue().known.values()
        assert late.count == 1


@pytest.mark.parametrize("wait", [None, 20], ids=["the queue's", "20 s"])
def test_task_stopped_during_long_poll_publishes_results(wait, tmp_path):
    publishing = Publishing("stopped", URL)
    task, staged = process(publishing, tmp_path, 1, wait_time_seconds=wait)
    proceed = threading.Event()
    receives: list[float] = []

    def answer(_: object) -> Any:
        receives.append(time.monotonic())
        if not publishing.fake.waiting():
            task.stop("signal")
            assert proceed.wait(timeout=20)
            return {}
        return None

    publishing.fake.answers("ReceiveMessage", answer)
    with installed(publishing.fake):
        reference = task.run()

        assert time.monotonic() - receives[-1] < 5
        proceed.set()
    assert (reference["received"], reference["stopped"]) == (40, "signal")
    manifest = staged.manifest("g")
    assert manifest is not None
    assert manifest.lease["state"]["messages"] == manifest.received == len(publishing.hidden())


@pytest.mark.parametrize("recovers", ["while it runs", "as it ends"])
@options(queue_url=FIFO)
def test_lost_receive_answer_does_not_block_groups(recovers, run):
    for body in ("x1", "x2", "y1"):
        run.fake.put([body], url=FIFO, group=body[0])

    def lose(request: dict[str, Any]) -> Any:
        run.fake.obey()
        run.fake.receive_message(**request)
        return client_error("ServiceUnavailable", status=503)

    run.fake.answers("ReceiveMessage", lose)
    if recovers == "while it runs":
        assert [message.data for message in run.take()] == [b"x1", b"x2", b"y1"]
        return
    with pytest.raises(ProducerUnavailable):
        run.source._broker.receive(10)
    assert run.fake.waiting(FIFO) == []

    run.source.stop()

    assert run.fake.waiting(FIFO) == ["x1", "x2", "y1"]
    assert run.source.lease.state["messages"] == 0
