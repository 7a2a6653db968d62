"""Kafka: throughput compared with the client library alone, and the overhead of the adapter.

``kafka.ceiling`` is librdkafka alone, a thousand messages per call, which are discarded.
``kafka.source`` is the package's source: fetches, claims, and creates messages.  ``kafka.process``
is a process stage, ``kafka.made_up`` the same stage with synthetic messages, ``kafka.settle`` the
settlement, and ``kafka.run`` are whole runs in a real Airflow with Spark.  ``.unordered`` uses
``order="none"``.  Messages have 200 bytes, callbacks are trivial, and there are two batchers.
Tries are interleaved, so that noise affects all; figures and ratios are medians, and each ratio is
to a figure of the same try.  ``.cpu`` is the client's CPU time per message, including all threads.

The server is Apache Kafka, one broker on this machine.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from scripts.local_airflow import LocalAirflow
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
from tests.benchmarks.stages import Stage, run_batches, run_stage, run_synthetic
from tests.benchmarks.synthetic import BODY
from tests.kafka_server import ApacheKafka, KafkaServer

MESSAGES = 100_000
SIZES = {"100k": 100_000, "1m": 1_000_000}
PARTITIONS = 8
PIPELINE = "tests.benchmarks.pipelines:KafkaPipeline"
#: The figures by the figure with which they are compared.
OF = {"source": "ceiling", "process": "made_up", "process.unordered": "made_up"}
#: The topic of the DAG.
TOPIC = "bench"


def bench_kafka(sizes: dict[str, int] | None = None, tries: int = 5) -> Figures:
    """Measures all figures with a new server."""
    sizes = SIZES if sizes is None else sizes
    measurements: dict[str, list[Measurement]] = {}
    peaks: Figures = []
    with temporary_folder() as folder, ApacheKafka.start(folder / "broker") as server:
        for _ in range(tries):
            for name, measurement in stages(server, MESSAGES):
                print_measurement(name, measurement)
                measurements.setdefault(name, []).append(measurement)
        peaks += [measure_peak(server, label, size) for label, size in sizes.items()]
        if sizes:
            server.topic(TOPIC, PARTITIONS)
            server.topic(f"{TOPIC}-dlt")
            with airflow_for(folder, "bench_kafka", server.connection()) as airflow:
                for _ in range(min(tries, 3)):
                    for label, size in sizes.items():
                        measurement = run_of_messages(airflow, server, size)
                        print_measurement(f"run.{label}", measurement)
                        measurements.setdefault(f"run.{label}", []).append(measurement)
    return [*figures(measurements), *peaks]


# -- the stages ------------------------------------------------------------------------------------


def new_topic(server: KafkaServer, count: int) -> str:
    """Creates a topic with this number of messages, and its retry and dead-letter topics."""
    name = server.topic(partitions=PARTITIONS)
    server.topic(f"{name}.retry")
    server.topic(f"{name}-dlt")
    server.fill(name, repeat(BODY, count))
    return name


def stages(server: KafkaServer, count: int) -> Iterator[tuple[str, Measurement]]:
    """Measures every stage once."""
    topic = new_topic(server, count)
    yield "ceiling", measure_separately("ceiling", server.bootstrap, topic, count)
    yield "source", measure_separately("source", server.bootstrap, topic, count)
    yield "made_up", to_measurement(count, run_synthetic(count))
    for name, order in (("process", "partition"), ("process.unordered", "none")):
        with temporary_folder() as folder:
            arguments = stage_arguments(server, folder, topic, order)
            stage = run_stage("process", max_messages=count, **arguments)
            yield name, to_measurement(count, stage)
            if order == "partition":
                run_batches(arguments)
                yield "settle", to_measurement(count, run_stage("settle", **arguments))
    server.delete_topic(topic)


def stage_arguments(server: KafkaServer, folder: Path, topic: str, order: str) -> dict[str, Any]:
    """Returns the arguments of a run's stages, with a new consumer group."""
    options = {
        "hosts": server.bootstrap,
        "conn_id": None,
        "topics": [topic],
        "group_id": uuid.uuid4().hex,
        "order": order,
    }
    return {"folder": str(folder), "ref": {"class": PIPELINE, "options": {"producer": options}}}


def to_measurement(count: int, stage: Stage) -> Measurement:
    """Returns the measurement of a stage.

    :raises RuntimeError: If it did not receive all messages.
    """
    received = stage.result.get("received", stage.result.get("acked"))
    if received != count:
        raise RuntimeError(f"{received} of {count} messages")
    return Measurement(count, stage.seconds, stage.cpu)


def measure_peak(server: ApacheKafka, label: str, size: int) -> dict[str, Any]:
    """Measures the peak memory of a process stage."""
    topic = new_topic(server, size)
    with temporary_folder() as folder:
        stage = run_stage("process", **stage_arguments(server, folder, topic, "partition"))
    server.delete_topic(topic)
    to_measurement(size, stage)
    return memory(f"kafka.{label}.process", stage.peak)


# -- the client, and the source, alone -------------------------------------------------------------


def measure_separately(name: str, bootstrap: str, topic: str, count: int) -> Measurement:
    """Measures a stage in a separate process."""
    return Measurement(*measure("kafka", name, bootstrap=bootstrap, topic=topic, count=count))


def ceiling(bootstrap: str, topic: str, count: int) -> Measurement:
    """Consumes all messages with librdkafka alone."""
    server = ApacheKafka(Path(), bootstrap=bootstrap)

    def work() -> int:
        from confluent_kafka import OFFSET_BEGINNING, TopicPartition

        with server.consumer(settings={"enable.partition.eof": False}) as consumer:
            consumer.assign([TopicPartition(topic, n, OFFSET_BEGINNING) for n in range(PARTITIONS)])
            got = 0
            while got < count:
                got += len(consumer.consume(1_000, timeout=5.0))
        return got

    return measure_work(count, work)


def source(bootstrap: str, topic: str, count: int) -> Measurement:
    """Receives all with this package's source, which keeps its claims in a folder."""
    import confluent_kafka  # noqa: F401 - loaded before the clock starts

    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka import KafkaProducer

    producer = KafkaProducer(
        hosts=bootstrap,
        conn_id=None,
        topics=[topic],
        group_id=uuid.uuid4().hex,
        offset_reset_policy="earliest",
    )
    with temporary_folder() as folder:
        env = ProducerEnv(generation="bench", staging=f"file://{folder}")

        def work() -> int:
            opened = producer.source(env)
            got = 0
            while got < count:
                got += len(opened.secure(opened.receive(1_000, timeout=5.0)))
            opened.stop()
            opened.close()
            return got

        return measure_work(count, work)


def measure_work(count: int, work: Callable[[], int]) -> Measurement:
    """Measures some work.

    :raises RuntimeError: If it did not receive all messages.
    """
    cpu, started = time.process_time(), time.perf_counter()
    got = work()
    measurement = Measurement(count, time.perf_counter() - started, time.process_time() - cpu)
    if got != count:
        raise RuntimeError(f"received {got} of {count}")
    return measurement


# -- whole runs ------------------------------------------------------------------------------------


def run_of_messages(airflow: LocalAirflow, server: ApacheKafka, count: int) -> Measurement:
    """Measures a run of the DAG."""
    airflow.wait_for_dag("bench_kafka")
    server.fill(TOPIC, repeat(BODY, count))
    return Measurement(count, time_dag_run(airflow, "bench_kafka"), 0.0)


# -- figures ---------------------------------------------------------------------------------------


def figures(measurements: dict[str, list[Measurement]]) -> Figures:
    """Returns medians, and ratios to a figure of the same try."""
    rows: Figures = []
    for name, tries in measurements.items():
        of = OF.get(name, "")
        ratios = (
            [a.rate / b.rate for a, b in zip(tries, measurements[of], strict=True)] if of else []
        )
        rates = [attempt.rate for attempt in tries]
        rows.append(median(f"kafka.{name}", rates, "msg/s", of=f"kafka.{of}", ratios=ratios))
        if tries[0].cpu:
            cpu = [attempt.cpu_per_message for attempt in tries]
            rows.append(median(f"kafka.{name}.cpu", cpu, "us/msg", digits=1))
    return rows


if __name__ == "__main__":
    print(
        json.dumps({"ceiling": ceiling, "source": source}[sys.argv[1]](**json.loads(sys.argv[2])))
    )
