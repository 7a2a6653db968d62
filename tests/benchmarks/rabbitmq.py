"""RabbitMQ: what a run gets of the broker's own speed.

``rabbitmq.ceiling`` is pika's ``SelectConnection`` alone: it consumes and acknowledges many at a
time, and does nothing with a message.  The others are this package's whole stages, in processes of
their own, and whole runs in a real Airflow, with Spark (``.connect``: on a warm Spark Connect
server): persistent messages of 200 bytes, trivial callbacks, two batchers.  Tries are interleaved,
so that what else the machine does falls on all of them; figures are medians, and so are the ratios,
each to the ceiling of the same try.  ``.cpu`` is the client's processor time for a message,
``.peak`` the largest process of a stage.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import psutil

from scripts.local_airflow import LocalAirflow
from scripts.spark_connect import ConnectServer
from tests.benchmarks.figures import (
    Figures,
    Took,
    airflow_for,
    folder_of_its_own,
    measure,
    median,
    memory,
    run_of,
    tell,
)
from tests.benchmarks.made_up import BODY
from tests.benchmarks.stages import Stage, run_batches, run_stage
from tests.rabbitmq_server import RabbitServer

MESSAGES = 100_000
SIZES = {"100k": 100_000, "1m": 1_000_000}
PIPELINE = "tests.benchmarks.pipelines:OnRabbitMQ"
#: The queue of the Dags.
QUEUE = "bench"
#: The end of each Dag's name, and of its figures.
VARIANTS = {"1": "", "2": ".producers_2", "connect": ".connect"}


def bench_rabbitmq(sizes: dict[str, int] | None = None, tries: int = 5) -> Figures:
    """All figures, against a server of its own."""
    sizes = SIZES if sizes is None else sizes
    taken: dict[str, list[Took]] = {}
    peaks: Figures = []
    with folder_of_its_own() as folder, RabbitServer.start(folder / "broker") as server:
        for _ in range(tries):
            for name, took in stages(server, MESSAGES):
                tell(name, took)
                taken.setdefault(name, []).append(took)
        for label, size in sizes.items():
            peaks += peaks_of(server, label, size)
        with airflow_with(server, folder) as airflow:
            run_of_messages(
                airflow, server, "1", MESSAGES
            )  # a pipeline's first run finds no queues
            for _ in range(tries):
                top = ceiling_of(server, MESSAGES)
                tell("ceiling", top)
                for label, size in sizes.items():
                    for dag, suffix in VARIANTS.items() if size == MESSAGES else (("1", ""),):
                        name = f"run.{label}{suffix}"
                        took = run_of_messages(airflow, server, dag, size)
                        tell(name, took)
                        taken.setdefault(name, []).append(took)
                        taken.setdefault(f"ceiling of {name}", []).append(top)
    return [*figures(taken), *peaks]


# -- the ceiling -----------------------------------------------------------------------------------


def fill(server: RabbitServer, queue: str, count: int) -> None:
    """Puts messages into a queue, and waits until they are there."""
    server.declare(queue)
    server.fill(queue, repeat(BODY, count))


def new_queue(server: RabbitServer, count: int) -> str:
    """A queue of its own with so many messages."""
    name = f"bench-{uuid.uuid4().hex}"
    fill(server, name, count)
    return name


def ceiling(url: str, queue: str, count: int) -> Took:
    """Consume all with pika alone; in this process."""
    import pika

    got, began = 0, 0.0

    def opened(raw: Any) -> None:
        raw.channel(on_open_callback=consume)

    def consume(channel: Any) -> None:
        nonlocal began
        began = time.perf_counter()
        channel.basic_qos(prefetch_count=1000)
        channel.basic_consume(queue, take)

    def take(channel: Any, method: Any, properties: Any, body: bytes) -> None:
        nonlocal got
        got += 1
        if got % 500 == 0:
            channel.basic_ack(method.delivery_tag, multiple=True)
        if got == count:
            connection.close()

    connection = pika.SelectConnection(
        pika.URLParameters(url),
        on_open_callback=opened,
        on_close_callback=lambda raw, error: raw.ioloop.stop(),
    )
    before = time.process_time()
    connection.ioloop.start()
    return Took(count, time.perf_counter() - began, time.process_time() - before)


def ceiling_of(server: RabbitServer, count: int) -> Took:
    """The ceiling, in a process of its own."""
    queue = new_queue(server, count)
    return Took(*measure("rabbitmq", url=server.url, queue=queue, count=count))


# -- the stages ------------------------------------------------------------------------------------


def stages(server: RabbitServer, count: int) -> Iterator[tuple[str, Took]]:
    """One try of every stage."""
    yield "ceiling", ceiling_of(server, count)
    with folder_of_its_own() as folder:
        arguments = prepared(server, folder, count)
        yield "process", took(count, run_stage("process", **arguments))
        run_batches(arguments)
        yield "settle", took(count, run_stage("settle", **arguments))
    with folder_of_its_own() as folder:
        arguments = prepared(server, folder, count)
        with ThreadPoolExecutor(2) as pool:
            half = {**arguments, "max_messages": count // 2}
            both = list(pool.map(lambda n: run_stage("process", index=n, **half), (0, 1)))
        seconds = max(s.begun + s.seconds for s in both) - min(s.begun for s in both)
        yield "process.producers_2", Took(count, seconds, sum(s.cpu for s in both))


def peaks_of(server: RabbitServer, label: str, size: int) -> Figures:
    """The largest process of each stage; every stage must find every message."""
    with folder_of_its_own() as folder:
        arguments = prepared(server, folder, size)
        result = [memory(f"rabbitmq.{label}.process", run_stage("process", **arguments).peak)]
        plans, spark = run_batches(arguments)
        result.append(memory(f"rabbitmq.{label}.batch", max(plan.peak for plan in plans)))
        result.append(memory(f"rabbitmq.{label}.spark", spark.peak))
        settled = run_stage("settle", **arguments)
        if settled.result["acked"] != size:
            raise RuntimeError(f"settled {settled.result} of {size}")
        return [*result, memory(f"rabbitmq.{label}.settle", settled.peak)]


def prepared(server: RabbitServer, folder: Path, count: int) -> dict[str, Any]:
    """Fills a run's queue, declares its own queues, and returns its stages' arguments."""
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.core.model.run_info import RunInfo
    from airflow_broadway.core.reference import load_ref
    from airflow_broadway.producers.rabbitmq.amqp.address import address_for
    from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
    from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
    from airflow_broadway.producers.rabbitmq.journal import QueueJournal

    queue = new_queue(server, count)
    options = {"queue": queue, "uri": server.uri}
    ref = {"class": PIPELINE, "options": {"producer": options}}
    pipeline = load_ref(ref, RunInfo())
    producer: Any = pipeline.producer
    # Only the first run on a queue waits for its holding queue to be old enough.
    connection = ConnectionThread(address_for(producer, ProducerEnv(generation=uuid.uuid4().hex)))
    journal = QueueJournal(f"file://{folder}/staging/{pipeline.name}", queue)
    queues = StandingQueues(producer, journal)
    queues.ensure_dead(connection)
    for number in range(2):
        queues.ensure_held(connection, queues.names.held(number))
    connection.close()
    return {"folder": str(folder), "ref": ref}


def took(count: int, stage: Stage) -> Took:
    """Returns the cost of a stage for a number of messages."""
    return Took(count, stage.seconds, stage.cpu)


# -- whole runs ------------------------------------------------------------------------------------


@contextmanager
def airflow_with(server: RabbitServer, folder: Path) -> Iterator[LocalAirflow]:
    """A real Airflow whose connection leads to the server, and a Spark Connect server."""
    connect = ConnectServer(folder / "connect")
    airflow = airflow_for(folder, "bench_rabbitmq", server.connection())
    airflow.env["BENCH_CONNECT"] = connect.url
    with connect, airflow:
        for name in VARIANTS:
            airflow.wait_for_dag(f"bench_rabbitmq_{name}")
        yield airflow


def run_of_messages(airflow: LocalAirflow, server: RabbitServer, name: str, count: int) -> Took:
    """One whole run of the Dag; its processor time is the scheduler's and all its tasks'."""
    fill(server, QUEUE, count)
    before = cpu_of(airflow)
    seconds = run_of(airflow, f"bench_rabbitmq_{name}")
    return Took(count, seconds, cpu_of(airflow) - before)


def cpu_of(airflow: LocalAirflow) -> float:
    """Seconds of processor time of the scheduler and what it has started, ended ones included."""
    scheduler = psutil.Process(airflow.processes["scheduler"].pid)
    total = 0.0
    for process in (scheduler, *scheduler.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


# -- figures ---------------------------------------------------------------------------------------


def figures(taken: dict[str, list[Took]]) -> Figures:
    """Medians, and the ratios to the ceiling of the same try."""
    rows: Figures = []
    for name, tries in taken.items():
        if name.startswith("ceiling of "):
            continue
        ratios = []
        if name != "ceiling":
            ceilings = taken.get(f"ceiling of {name}", taken["ceiling"])
            ratios = [a.rate / b.rate for a, b in zip(tries, ceilings, strict=True)]
        name = f"rabbitmq.{name}"
        rates = [attempt.rate for attempt in tries]
        rows.append(median(name, rates, "msg/s", of="rabbitmq.ceiling", ratios=ratios))
        cpu = [attempt.cpu_of_each for attempt in tries]
        rows.append(median(f"{name}.cpu", cpu, "us/msg", digits=1))
    return rows


if __name__ == "__main__":
    print(json.dumps(ceiling(**json.loads(sys.argv[1]))))
