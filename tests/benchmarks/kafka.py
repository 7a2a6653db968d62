"""Kafka: what a run gets of the client's own speed, and what the adapter costs.

``kafka.ceiling`` is librdkafka alone, a thousand messages a call, of which nothing is made;
``kafka.source`` is this package's source alone: fetched, claimed, and made messages of.
``kafka.process`` is a whole process stage, ``kafka.made_up`` the same one on a source that makes
the same messages up, ``kafka.settle`` the settlement of all of them, and ``kafka.run`` whole runs
in a real Airflow, with Spark.  ``.unordered`` is with ``order="none"``.  Messages have 200 bytes,
callbacks are trivial, and there are two batchers.  Tries are
interleaved, so that what else the machine does falls on all of them; figures are medians, and so
are the ratios, each to a figure of the same try.  ``.cpu`` is the client's processor time for a
message, with all of its threads.

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
from tests.benchmarks.stages import Stage, run_batches, run_made_up, run_stage
from tests.kafka_server import ApacheKafka, KafkaServer

MESSAGES = 100_000
SIZES = {"100k": 100_000, "1m": 1_000_000}
PARTITIONS = 8
PIPELINE = "tests.benchmarks.pipelines:OnKafka"
#: What is compared with what.
OF = {"source": "ceiling", "process": "made_up", "process.unordered": "made_up"}
#: The topic of the Dag.
TOPIC = "bench"


def bench_kafka(sizes: dict[str, int] | None = None, tries: int = 5) -> Figures:
    """All figures, against a server of its own."""
    sizes = SIZES if sizes is None else sizes
    taken: dict[str, list[Took]] = {}
    peaks: Figures = []
    with folder_of_its_own() as folder, ApacheKafka.start(folder / "broker") as server:
        for _ in range(tries):
            for name, took in stages(server, MESSAGES):
                tell(name, took)
                taken.setdefault(name, []).append(took)
        peaks += [peak_of(server, label, size) for label, size in sizes.items()]
        if sizes:
            server.topic(TOPIC, PARTITIONS)
            server.topic(f"{TOPIC}-dlt")
            with airflow_for(folder, "bench_kafka", server.connection()) as airflow:
                for _ in range(min(tries, 3)):
                    for label, size in sizes.items():
                        took = run_of_messages(airflow, server, size)
                        tell(f"run.{label}", took)
                        taken.setdefault(f"run.{label}", []).append(took)
    return [*figures(taken), *peaks]


# -- the stages ------------------------------------------------------------------------------------


def new_topic(server: KafkaServer, count: int) -> str:
    """A topic of its own with so many messages, and its two for failures."""
    name = server.topic(partitions=PARTITIONS)
    server.topic(f"{name}.retry")
    server.topic(f"{name}-dlt")
    server.fill(name, repeat(BODY, count))
    return name


def stages(server: KafkaServer, count: int) -> Iterator[tuple[str, Took]]:
    """One try of every stage."""
    topic = new_topic(server, count)
    yield "ceiling", apart("ceiling", server.bootstrap, topic, count)
    yield "source", apart("source", server.bootstrap, topic, count)
    yield "made_up", of_stage(count, run_made_up(count))
    for name, order in (("process", "partition"), ("process.unordered", "none")):
        with folder_of_its_own() as folder:
            arguments = given_for(server, folder, topic, order)
            yield name, of_stage(count, run_stage("process", **arguments))
            if order == "partition":
                run_batches(arguments)
                yield "settle", of_stage(count, run_stage("settle", **arguments))
    server.delete_topic(topic)


def given_for(server: KafkaServer, folder: Path, topic: str, order: str) -> dict[str, Any]:
    """Returns the arguments of one run's stages; the group is a new one."""
    options = {
        "hosts": server.bootstrap,
        "conn_id": None,
        "topics": [topic],
        "group_id": uuid.uuid4().hex,
        "order": order,
    }
    return {"folder": str(folder), "ref": {"class": PIPELINE, "options": {"producer": options}}}


def of_stage(count: int, stage: Stage) -> Took:
    """Returns the cost of a stage for a number of messages.

    :raises RuntimeError: If it did not take them all.
    """
    received = stage.result.get("received", stage.result.get("acked"))
    if received != count:
        raise RuntimeError(f"{received} of {count} messages")
    return Took(count, stage.seconds, stage.cpu)


def peak_of(server: ApacheKafka, label: str, size: int) -> dict[str, Any]:
    """The largest process of a process stage."""
    topic = new_topic(server, size)
    with folder_of_its_own() as folder:
        stage = run_stage("process", **given_for(server, folder, topic, "partition"))
    server.delete_topic(topic)
    of_stage(size, stage)
    return memory(f"kafka.{label}.process", stage.peak)


# -- the client, and the source, alone -------------------------------------------------------------


def apart(name: str, bootstrap: str, topic: str, count: int) -> Took:
    """Measures one stage in a process of its own."""
    return Took(*measure("kafka", name, bootstrap=bootstrap, topic=topic, count=count))


def ceiling(bootstrap: str, topic: str, count: int) -> Took:
    """Consume all with librdkafka alone."""
    server = ApacheKafka(Path(), bootstrap=bootstrap)

    def work() -> int:
        from confluent_kafka import OFFSET_BEGINNING, TopicPartition

        with server.consumer(settings={"enable.partition.eof": False}) as consumer:
            consumer.assign([TopicPartition(topic, n, OFFSET_BEGINNING) for n in range(PARTITIONS)])
            got = 0
            while got < count:
                got += len(consumer.consume(1_000, timeout=5.0))
        return got

    return timed(count, work)


def source(bootstrap: str, topic: str, count: int) -> Took:
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
    with folder_of_its_own() as folder:
        env = ProducerEnv(generation="bench", staging=f"file://{folder}")

        def work() -> int:
            opened = producer.source(env)
            got = 0
            while messages := opened.secure(opened.receive(1_000, timeout=1.0)):
                got += len(messages)
            opened.stop()
            opened.close()
            return got

        return timed(count, work)


def timed(count: int, work: Callable[[], int]) -> Took:
    """Measures some work.

    :raises RuntimeError: If it did not get all.
    """
    cpu, begun = time.process_time(), time.perf_counter()
    got = work()
    took = Took(count, time.perf_counter() - begun, time.process_time() - cpu)
    if got != count:
        raise RuntimeError(f"received {got} of {count}")
    return took


# -- whole runs ------------------------------------------------------------------------------------


def run_of_messages(airflow: LocalAirflow, server: ApacheKafka, count: int) -> Took:
    """One whole run of the Dag."""
    airflow.wait_for_dag("bench_kafka")
    server.fill(TOPIC, repeat(BODY, count))
    return Took(count, run_of(airflow, "bench_kafka"), 0.0)


# -- figures ---------------------------------------------------------------------------------------


def figures(taken: dict[str, list[Took]]) -> Figures:
    """Medians, and ratios to a figure of the same try."""
    rows: Figures = []
    for name, tries in taken.items():
        of = OF.get(name, "")
        ratios = [a.rate / b.rate for a, b in zip(tries, taken[of], strict=True)] if of else []
        rates = [attempt.rate for attempt in tries]
        rows.append(median(f"kafka.{name}", rates, "msg/s", of=f"kafka.{of}", ratios=ratios))
        if tries[0].cpu:
            cpu = [attempt.cpu_of_each for attempt in tries]
            rows.append(median(f"kafka.{name}.cpu", cpu, "us/msg", digits=1))
    return rows


if __name__ == "__main__":
    print(
        json.dumps({"ceiling": ceiling, "source": source}[sys.argv[1]](**json.loads(sys.argv[2])))
    )
