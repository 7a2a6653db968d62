"""RabbitMQ: throughput compared with pika alone.

``rabbitmq.ceiling`` is pika's ``SelectConnection`` alone: it consumes, discards, and acknowledges
many messages at a time.  The others are the package's stages in separate processes, and whole runs
in a real Airflow with Spark (``.connect``: on a running Spark Connect server, after one run, with
which the server checks its executors once a day): persistent messages of 200 bytes, trivial
callbacks, two batchers.  Tries are interleaved, so that noise affects all;
figures and ratios are medians, and each ratio is to the ceiling of the same try.  ``.cpu`` is the
client's CPU time per message, ``.peak`` the memory of the largest process of a stage.
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
    Measurement,
    airflow_for,
    measure,
    median,
    memory,
    print_measurement,
    temporary_folder,
    time_dag_run,
)
from tests.benchmarks.stages import Stage, run_batches, run_stage
from tests.benchmarks.synthetic import BODY
from tests.rabbitmq_server import RabbitServer

MESSAGES = 100_000
SIZES = {"100k": 100_000, "1m": 1_000_000}
PIPELINE = "tests.benchmarks.pipelines:RabbitMQPipeline"
#: The queue of the DAGs.
QUEUE = "bench"
#: The end of each Dag's name, and of its figures.
VARIANTS = {"1": "", "2": ".producers_2", "connect": ".connect"}


def bench_rabbitmq(sizes: dict[str, int] | None = None, tries: int = 5) -> Figures:
    """Measures all figures with a new server."""
    sizes = SIZES if sizes is None else sizes
    measurements: dict[str, list[Measurement]] = {}
    peaks: Figures = []
    with temporary_folder() as folder, RabbitServer.start(folder / "broker") as server:
        for _ in range(tries):
            for name, measurement in stages(server, MESSAGES):
                print_measurement(name, measurement)
                measurements.setdefault(name, []).append(measurement)
        for label, size in sizes.items():
            peaks += measure_peaks(server, label, size)
        with airflow_with(server, folder) as airflow:
            for dag in VARIANTS:  # warm-up
                run_of_messages(airflow, server, dag, MESSAGES)
            for _ in range(tries):
                top = measure_ceiling(server, MESSAGES)
                print_measurement("ceiling", top)
                for label, size in sizes.items():
                    for dag, suffix in VARIANTS.items() if size == MESSAGES else (("1", ""),):
                        name = f"run.{label}{suffix}"
                        measurement = run_of_messages(airflow, server, dag, size)
                        print_measurement(name, measurement)
                        measurements.setdefault(name, []).append(measurement)
                        measurements.setdefault(f"ceiling of {name}", []).append(top)
    return [*figures(measurements), *peaks]


# -- the ceiling -----------------------------------------------------------------------------------


def fill(server: RabbitServer, queue: str, count: int) -> None:
    """Publishes messages to a queue and waits until they are ready."""
    server.declare(queue)
    server.fill(queue, repeat(BODY, count))


def new_queue(server: RabbitServer, count: int) -> str:
    """Creates a queue with this number of messages."""
    name = f"bench-{uuid.uuid4().hex}"
    fill(server, name, count)
    return name


def ceiling(url: str, queue: str, count: int) -> Measurement:
    """Consumes all messages with pika alone, in this process."""
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
    return Measurement(count, time.perf_counter() - began, time.process_time() - before)


def measure_ceiling(server: RabbitServer, count: int) -> Measurement:
    """Measures the ceiling in a separate process."""
    queue = new_queue(server, count)
    return Measurement(*measure("rabbitmq", url=server.url, queue=queue, count=count))


# -- the stages ------------------------------------------------------------------------------------


def stages(server: RabbitServer, count: int) -> Iterator[tuple[str, Measurement]]:
    """Measures every stage once."""
    yield "ceiling", measure_ceiling(server, count)
    with temporary_folder() as folder:
        arguments = prepare_run(server, folder, count)
        yield "process", to_measurement(count, run_stage("process", **arguments))
        run_batches(arguments)
        yield "settle", to_measurement(count, run_stage("settle", **arguments))
    with temporary_folder() as folder:
        arguments = prepare_run(server, folder, count)
        with ThreadPoolExecutor(2) as pool:
            half = {**arguments, "max_messages": count // 2}
            both = list(pool.map(lambda n: run_stage("process", index=n, **half), (0, 1)))
        seconds = max(s.started + s.seconds for s in both) - min(s.started for s in both)
        yield "process.producers_2", Measurement(count, seconds, sum(s.cpu for s in both))


def measure_peaks(server: RabbitServer, label: str, size: int) -> Figures:
    """Measures the peak memory of each stage, and checks that it received all messages."""
    with temporary_folder() as folder:
        arguments = prepare_run(server, folder, size)
        result = [memory(f"rabbitmq.{label}.process", run_stage("process", **arguments).peak)]
        plans, spark = run_batches(arguments)
        result.append(memory(f"rabbitmq.{label}.batch", max(plan.peak for plan in plans)))
        result.append(memory(f"rabbitmq.{label}.spark", spark.peak))
        settled = run_stage("settle", **arguments)
        if settled.result["acked"] != size:
            raise RuntimeError(f"settled {settled.result} of {size}")
        return [*result, memory(f"rabbitmq.{label}.settle", settled.peak)]


def prepare_run(server: RabbitServer, folder: Path, count: int) -> dict[str, Any]:
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
    # Only the first run on a queue waits until its holding queue is reliable.
    connection = ConnectionThread(address_for(producer, ProducerEnv(generation=uuid.uuid4().hex)))
    journal = QueueJournal(f"file://{folder}/staging/{pipeline.name}", queue)
    queues = StandingQueues(producer, journal)
    queues.ensure_dead(connection)
    for number in range(2):
        queues.ensure_held(connection, queues.names.held(number))
    connection.close()
    return {"folder": str(folder), "ref": ref}


def to_measurement(count: int, stage: Stage) -> Measurement:
    """Returns the measurement of a stage."""
    return Measurement(count, stage.seconds, stage.cpu)


# -- whole runs ------------------------------------------------------------------------------------


@contextmanager
def airflow_with(server: RabbitServer, folder: Path) -> Iterator[LocalAirflow]:
    """Starts a real Airflow with a connection to the server, and a Spark Connect server."""
    connect = ConnectServer(folder / "connect")
    airflow = airflow_for(folder, "bench_rabbitmq", server.connection())
    airflow.env["BENCH_CONNECT"] = connect.url
    with connect, airflow:
        for name in VARIANTS:
            airflow.wait_for_dag(f"bench_rabbitmq_{name}")
        yield airflow


def run_of_messages(
    airflow: LocalAirflow, server: RabbitServer, name: str, count: int
) -> Measurement:
    """Measures a run of the DAG; the CPU time is that of the scheduler and all tasks."""
    fill(server, QUEUE, count)
    before = cpu_of(airflow)
    seconds = time_dag_run(airflow, f"bench_rabbitmq_{name}")
    return Measurement(count, seconds, cpu_of(airflow) - before)


def cpu_of(airflow: LocalAirflow) -> float:
    """Returns the CPU seconds of the scheduler and its child processes, including ended ones."""
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


def figures(measurements: dict[str, list[Measurement]]) -> Figures:
    """Returns medians, and ratios to the ceiling of the same try."""
    rows: Figures = []
    for name, tries in measurements.items():
        if name.startswith("ceiling of "):
            continue
        ratios = []
        if name != "ceiling":
            ceilings = measurements.get(f"ceiling of {name}", measurements["ceiling"])
            ratios = [a.rate / b.rate for a, b in zip(tries, ceilings, strict=True)]
        name = f"rabbitmq.{name}"
        rates = [attempt.rate for attempt in tries]
        rows.append(median(name, rates, "msg/s", of="rabbitmq.ceiling", ratios=ratios))
        cpu = [attempt.cpu_per_message for attempt in tries]
        rows.append(median(f"{name}.cpu", cpu, "us/msg", digits=1))
    return rows


if __name__ == "__main__":
    print(json.dumps(ceiling(**json.loads(sys.argv[1]))))
