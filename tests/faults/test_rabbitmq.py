"""RabbitMQ under kill -9, broken networks, and queues that vanish or refuse: nothing is lost."""

from __future__ import annotations

import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from airflow_broadway.core.custody import RELEASE, Lease, Settlement, Source
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, ProducerError
from airflow_broadway.core.message import Message
from airflow_broadway.core.producer import ProducerEnv
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.journal import Journal
from airflow_broadway.producers.rabbitmq.queues import Queues
from airflow_broadway.testing.contract import ids, settlement_of
from tests.faults.rabbitmq_truth import (
    Proxy,
    Truth,
    depth,
    fill,
    finish,
    kill_now_and_then,
    spawn,
    truth,
)
from tests.rabbitmq_fixtures import in_ci, wanted_server
from tests.rabbitmq_server import RabbitServer, find_server, given_url

pytestmark = [pytest.mark.faults, pytest.mark.broker]


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """A server that a test may kill."""
    if find_server() is None or given_url() is not None:
        if in_ci() and given_url() is None:
            pytest.fail("RabbitMQ is not installed")
        pytest.skip("no RabbitMQ of the tests' own to kill")
    with RabbitServer.start(tmp_path_factory.mktemp("mortal")) as server:
        yield server


@pytest.fixture
def queue() -> str:
    return f"faults-{uuid.uuid4().hex}"


def uri_of(server: RabbitServer) -> str:
    host, port = server.address
    return f"amqp://{host}:{port}"


class Runs:
    """Generations of one queue, opened and settled by hand."""

    def __init__(self, server: RabbitServer, queue: str, folder: Path, lease: float = 30.0) -> None:
        self.url, self.queue, self.folder = server.url, queue, folder
        self.queues = Queues(queue)
        self.producer = RabbitMQProducer(
            queue=queue, uri=uri_of(server), lease=lease, reconnect_timeout=5.0
        )

    def env(self, generation: str) -> ProducerEnv:
        return ProducerEnv(generation=generation, staging=f"file://{self.folder}")

    def source(self, generation: str) -> Source:
        return self.producer.source(self.env(generation))

    def lease_queue(self, generation: str) -> str:
        """Its name, once the generation has one."""
        opened = Journal(f"file://{self.folder}", self.queue).opened(generation)
        assert opened is not None
        return opened

    def take(self, source: Source, most: int = 100_000) -> list[Message]:
        taken: list[Message] = []
        while len(taken) < most:
            got = source.secure(source.receive(min(1000, most - len(taken)), timeout=1.0))
            if not got:
                break
            taken += got
        return taken

    def hold(self, generation: str, most: int = 100_000) -> tuple[Lease, list[Message]]:
        source = self.source(generation)
        try:
            messages = self.take(source, most)
            return source.lease, messages
        finally:
            source.close()

    def settle(self, lease: Lease, settlement: Settlement) -> object:
        custodian = self.producer.custodian(self.env(lease.generation))
        try:
            return custodian.settle(lease, settlement)
        finally:
            custodian.close()

    def rest(self) -> list[int]:
        """Every number that can still be received, in order."""
        found: list[int] = []
        while True:
            lease, messages = self.hold(uuid.uuid4().hex)
            if not messages:
                return sorted(found)
            found += [int(message.data) for message in messages]
            self.settle(lease, settlement_of(messages))


def nothing_lost(found: Truth, *, dead: int | None = None) -> None:
    assert found.lost == []
    assert found.unmarked == []
    assert not any(found.left_over.values())
    if dead is not None:
        assert found.dead >= dead


# -- kill -9 -----------------------------------------------------------------------------------


def test_without_a_kill_nothing_is_handled_twice(tmp_path: Path, queue: str) -> None:
    server = wanted_server()
    fill(server.url, queue, 3_000)

    finish(tmp_path, uri_of(server), queue, lease=30.0, most=1_000)

    found = truth(tmp_path, server.url, queue, 3_000)
    nothing_lost(found)
    assert found.duplicates == 0
    assert found.dead == len(range(0, 3_000, 7))


@pytest.mark.parametrize("kind", ["classic", pytest.param("quorum", marks=pytest.mark.slow)])
def test_killed_at_any_instant(tmp_path: Path, queue: str, kind: str) -> None:
    server = wanted_server()
    fill(server.url, queue, 4_000, kind=kind)

    kill_now_and_then(
        tmp_path, uri_of(server), queue, lease=30.0, most=500, kills=6, seed=len(kind)
    )

    nothing_lost(truth(tmp_path, server.url, queue, 4_000), dead=len(range(0, 4_000, 7)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_broker_that_is_killed_and_comes_back(
    mortal: RabbitServer, tmp_path: Path, queue: str, kind: str
) -> None:
    fill(mortal.url, queue, 6_000, kind=kind)
    worker = spawn(tmp_path, uri_of(mortal), queue, 60.0, 800)
    for pause in (0.4, 1.5):
        time.sleep(pause)
        mortal.kill()
        mortal.run()
    assert worker.wait(timeout=200) == 0

    finish(tmp_path, uri_of(mortal), queue, lease=60.0, most=800)

    nothing_lost(truth(tmp_path, mortal.url, queue, 6_000))


@pytest.mark.slow
def test_a_broker_that_is_killed_while_leases_lapse(
    mortal: RabbitServer, tmp_path: Path, queue: str
) -> None:
    runs = Runs(mortal, queue, tmp_path, lease=10.0)
    fill(mortal.url, queue, 3_000)
    lease, messages = runs.hold("g1")
    assert len(messages) == 3_000
    time.sleep(max(0.0, (lease.deadline - runs.env("g").clock.now()).total_seconds()))
    mortal.kill()
    mortal.run()
    time.sleep(5)

    assert runs.rest() == list(range(3_000))


# -- the network -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["cut", "half_close", "stall"])
def test_a_network_that_breaks(tmp_path: Path, queue: str, harm: str) -> None:
    server = wanted_server()
    fill(server.url, queue, 5_000)
    with Proxy(server.address) as proxy:
        uri = f"amqp://127.0.0.1:{proxy.port}"
        worker = spawn(tmp_path, uri, queue, 40.0, 600)
        for pause in (0.3, 0.7, 0.5):
            time.sleep(pause)
            getattr(proxy, harm)()
            if harm == "stall":
                time.sleep(1.0)
                proxy.go_on()
        assert worker.wait(timeout=200) == 0

        finish(tmp_path, uri_of(server), queue, lease=40.0, most=600)

    nothing_lost(truth(tmp_path, server.url, queue, 5_000))


# -- queues that vanish or refuse -------------------------------------------------------------


def test_a_lease_queue_deleted_in_mid_transfer(tmp_path: Path, queue: str) -> None:
    server = wanted_server()
    runs = Runs(server, queue, tmp_path)
    fill(server.url, queue, 4_000)
    source = runs.source("g1")
    try:
        first = runs.take(source, 1_000)
        with pika.BlockingConnection(pika.URLParameters(server.url)) as connection:
            connection.channel().queue_delete(runs.lease_queue("g1"))
        with pytest.raises(LeaseLapsed, match="takes no more messages"):
            runs.take(source)
    finally:
        source.close()

    # Deleted with what it held: that is the operator's doing; all else is still the source's.
    taken = {int(message.data) for message in first}
    assert set(runs.rest()) >= set(range(4_000)) - taken


@pytest.mark.slow
def test_a_lease_queue_deleted_after_the_manifest_loses_nothing(tmp_path: Path, queue: str) -> None:
    server = wanted_server()
    runs = Runs(server, queue, tmp_path)
    fill(server.url, queue, 900)
    lease, messages = runs.hold("g1")
    with pika.BlockingConnection(pika.URLParameters(server.url)) as connection:
        connection.channel().queue_delete(runs.lease_queue("g1"))

    released = dict.fromkeys(ids(messages[:100]), RELEASE)
    report = runs.settle(lease, settlement_of(messages, released))

    assert (report.acked, report.released, report.lapsed) == (800, 100, 0)  # type: ignore[attr-defined]
    assert runs.rest() == list(range(100))


@pytest.mark.slow
def test_a_lease_queue_that_refuses(tmp_path: Path, queue: str) -> None:
    server = wanted_server()
    runs = Runs(server, queue, tmp_path)
    fill(server.url, queue, 4_000)
    from airflow_broadway.producers.rabbitmq import topology
    from airflow_broadway.producers.rabbitmq.queues import lease_arguments

    def small(*given: object, **named: object) -> dict[str, object]:
        return {**lease_arguments(*given, **named), "x-max-length": 2}  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "lease_arguments", small)
        source = runs.source("g1")
        handed = 0
        with pytest.raises(BroadwayError, match="takes no more messages"):  # noqa: PT012
            while True:
                handed += len(source.secure(source.receive(1000, timeout=1.0)))
        lease = source.lease
        source.close()
    assert depth(server.url, runs.lease_queue("g1")) is not None
    assert handed < 4_000

    runs.settle(lease, Settlement(rest=RELEASE))

    assert set(runs.rest()) == set(range(4_000))


@pytest.mark.slow  # the broker's dead-letter worker tries again after three minutes
def test_a_returns_queue_that_is_missing_when_the_lease_lapses(tmp_path: Path, queue: str) -> None:
    server = wanted_server()
    runs = Runs(server, queue, tmp_path, lease=3.0)
    fill(server.url, queue, 1_000)
    runs.hold("g1")
    with pika.BlockingConnection(pika.URLParameters(server.url)) as connection:
        connection.channel().queue_delete(runs.queues.returns)
    time.sleep(4)
    # The dead-letter worker holds them, and tries again when the queue exists: a run makes it.
    source = runs.source("g2")
    source.receive(1, timeout=0.1)
    source.close()
    assert depth(server.url, runs.lease_queue("g1")) is not None
    runs.settle(runs_lease(runs, "g1"), Settlement(rest=RELEASE))

    end = time.monotonic() + 240
    found: list[int] = []
    while len(found) < 1_000 and time.monotonic() < end:
        found += runs.rest()
        time.sleep(2)
    assert sorted(found) == list(range(1_000))


def runs_lease(runs: Runs, generation: str) -> Lease:
    """The lease as a sweep knows it: as it was before the first receive."""
    source = runs.source("unused")
    lease = source.lease
    source.close()
    return Lease(
        kind=lease.kind, generation=generation, seconds=lease.seconds, deadline=lease.deadline
    )


@pytest.mark.slow
def test_a_returns_queue_that_is_full_keeps_what_is_released(tmp_path: Path, queue: str) -> None:
    server = wanted_server()
    runs = Runs(server, queue, tmp_path)
    fill(server.url, queue, 2_000)
    first, _ = runs.hold("g1", 1_000)
    second, _ = runs.hold("g2")
    runs.settle(first, Settlement(rest=RELEASE))
    set_policy(server, runs.queues.returns, {"max-length": 1, "overflow": "reject-publish"})

    with pytest.raises(ProducerError, match="takes nothing"):
        runs.settle(second, Settlement(rest=RELEASE))

    set_policy(server, runs.queues.returns, None)
    runs.settle(second, Settlement(rest=RELEASE))
    assert set(runs.rest()) == set(range(2_000))


def set_policy(server: RabbitServer, queue: str, definition: dict[str, object] | None) -> None:
    """Set or remove a policy for one queue, by the management API."""
    import base64
    import json
    import urllib.request

    if server.given is not None:
        pytest.skip("no management API of the tests' own")
    login = base64.b64encode(b"guest:guest").decode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.management_port}/api/policies/%2F/full-{queue[-8:]}",
        method="DELETE" if definition is None else "PUT",
        headers={"Authorization": f"Basic {login}", "Content-Type": "application/json"},
        data=None
        if definition is None
        else json.dumps(
            {"pattern": f"^{queue}$", "definition": definition, "apply-to": "queues"}
        ).encode(),
    )
    urllib.request.urlopen(request, timeout=10).close()
    time.sleep(1.0)


@pytest.mark.slow
def test_a_source_queue_that_is_deleted_ends_the_run_with_its_name(
    tmp_path: Path, queue: str
) -> None:
    server = wanted_server()
    runs = Runs(server, queue, tmp_path)
    fill(server.url, queue, 3_000)
    source = runs.source("g1")
    try:
        first = runs.take(source, 1_000)
        with pika.BlockingConnection(pika.URLParameters(server.url)) as connection:
            connection.channel().queue_delete(queue)
        with pytest.raises(ProducerError, match=queue):  # noqa: PT012
            for _ in range(100):
                first += source.secure(source.receive(1000, timeout=0.2))
        lease = source.lease
    finally:
        source.close()

    # What was secured is still held.
    report = runs.settle(lease, settlement_of(first))
    assert report.acked == len(first)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_full_source_queue_refuses_a_requeue_and_the_message_comes_back(
    tmp_path: Path, queue: str
) -> None:
    server = wanted_server()
    fill(
        server.url, queue, 20, kind="quorum", **{"x-max-length": 20, "x-overflow": "reject-publish"}
    )
    runs = Runs(server, queue, tmp_path)
    lease, messages = runs.hold("g1")
    fill_up(server.url, queue, 25)
    from airflow_broadway.core.custody import Action, Verdict

    again = Verdict(Action.RETRY, 0.0, "once more", "process")
    verdicts = dict.fromkeys(ids(messages[:5]), again)

    report = runs.settle(lease, settlement_of(messages, verdicts))

    assert (report.acked, report.requeued + report.failed) == (15, 5)  # type: ignore[attr-defined]
    assert report.failed > 0  # type: ignore[attr-defined]
    assert [number for number in runs.rest() if number < 1_000] == [
        int(message.data) for message in messages[:5]
    ]


def fill_up(url: str, queue: str, count: int) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for number in range(count):
            channel.basic_publish("", queue, str(1_000 + number).encode())


# -- others at work --------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_at_once_on_one_queue(tmp_path: Path, queue: str) -> None:
    server = wanted_server()
    fill(server.url, queue, 4_000)
    workers: list[subprocess.Popen[bytes]] = []
    threads = [
        threading.Thread(
            target=lambda name=name: workers.append(
                spawn(tmp_path / name, uri_of(server), queue, 60.0, 700)
            )
        )
        for name in ("one", "two")
    ]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]

    seen = [set(truth(tmp_path / n, server.url, queue, 4_000).lost) for n in ("one", "two")]
    assert seen[0] & seen[1] == set()


def test_a_zombie_is_fenced_off_and_loses_nothing(tmp_path: Path, queue: str) -> None:
    server = wanted_server()
    runs = Runs(server, queue, tmp_path)
    fill(server.url, queue, 4_000)
    zombie = runs.source("zombie")
    try:
        runs.take(zombie, 1_000)
        # A sweep takes it for dead while it lives and goes on.
        runs.settle(zombie.lease, Settlement(rest=RELEASE))
        with pytest.raises(BroadwayError):
            runs.take(zombie)
    finally:
        zombie.close()

    assert runs.rest() == list(range(4_000))


@pytest.mark.slow
def test_messages_that_kill_their_process_are_found_and_set_aside(
    tmp_path: Path, queue: str
) -> None:
    server = wanted_server()
    fill(server.url, queue, 24)
    runs = Runs(server, queue, tmp_path)
    runs.producer = RabbitMQProducer(queue=queue, uri=uri_of(server), lease=30.0, max_crashes=1)
    handled: set[int] = set()
    for _ in range(60):
        lease, messages = runs.hold(uuid.uuid4().hex)
        if not messages:
            break
        if any(int(message.data) == 13 for message in messages):
            runs.settle(lease, Settlement(rest=RELEASE))  # its process died
            continue
        handled |= {int(message.data) for message in messages}
        runs.settle(lease, settlement_of(messages))

    assert handled == set(range(24)) - {13}
    assert depth(server.url, runs.queues.dead) == 1
