"""RabbitMQ: what a run gets of the broker's own speed.

``rabbitmq.ceiling`` is pika's ``SelectConnection`` alone: it consumes and acknowledges many at a
time, and does nothing with a message.  The others are this package's whole stages, in processes of
their own: persistent messages of 200 bytes, trivial callbacks, two batchers.  Tries are
interleaved, so that what else the machine does falls on all of them; the figures are medians.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from tests.rabbitmq_server import RabbitServer

__all__ = ["bench_rabbitmq"]

MESSAGES = 100_000
BODY = b"x" * 200
PIPELINE = "tests.benchmarks.rabbitmq_pipeline:Bench"
#: Ratios to ``rabbitmq.ceiling`` to be reached.
TARGETS = {"process.broker": 0.65, "process.staged": 0.65, "settle": 5.0}


def fill(url: str, queue: str, count: int) -> None:
    """Put messages into a new queue."""
    import pika

    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        properties = pika.BasicProperties(delivery_mode=2)
        for _ in range(count):
            channel.basic_publish("", queue, BODY, properties)
        while channel.queue_declare(queue, passive=True).method.message_count < count:
            time.sleep(0.05)


def ceiling(url: str, queue: str, count: int) -> dict[str, float]:
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
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - before}


def bench_rabbitmq(messages: int = MESSAGES, tries: int = 5) -> list[dict[str, Any]]:
    """All figures, against a server of its own."""
    taken: dict[str, list[tuple[float, float, int]]] = {}
    with tempfile.TemporaryDirectory() as folder, RabbitServer.start(Path(folder)) as server:
        host = server.url.rpartition("@")[2].rstrip("/")
        for _ in range(tries):
            name = f"bench-{uuid.uuid4().hex}"
            fill(server.url, name, messages)
            taken.setdefault("ceiling", []).append(
                apart("ceiling", url=server.url, queue=name, count=messages)
            )
            for custody in ("broker", "staged"):
                name = f"bench-{uuid.uuid4().hex}"
                fill(server.url, name, messages)
                options = {"queue": name, "uri": f"amqp://{host}", "custody": custody}
                given = {
                    "folder": tempfile.mkdtemp(dir=folder),
                    "ref": {"class": PIPELINE, "options": {"producer": options}},
                }
                taken.setdefault(f"process.{custody}", []).append(
                    apart("process", count=messages, **given)
                )
                settled = settle_all(given, messages)
                if custody == "broker":
                    taken.setdefault("settle", []).append((settled, 0.0, 0))
    return figures(taken, messages)


def process(folder: str, ref: dict[str, Any], count: int) -> dict[str, float]:
    """A whole process stage: receive, secure, handle, stage, publish; in this process."""
    import pika  # noqa: F401 - imported before the clock starts, as all that is loaded lazily
    import pyarrow.parquet  # noqa: F401

    from airflow_broadway.core.intake import Budget
    from airflow_broadway.core.producer import ProducerEnv
    from airflow_broadway.operators._process import Process
    from airflow_broadway.producers.rabbitmq import custodian, source  # noqa: F401

    run, pipeline, staging = staged(folder, ref)
    owner = {"dag_id": "bench", "run_id": "bench", "task_id": "process"}
    env = ProducerEnv(
        pipeline=pipeline.name,
        generation=uuid.uuid4().hex,
        owner={**owner, "map_index": 0, "try_number": 1},
        staging=staging,
    )
    warm(pipeline, env)
    before, began = time.process_time(), time.perf_counter()
    result = Process(run, pipeline, env=env, budget=Budget(max_messages=count)).run()
    taken = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - before}
    if result["received"] != count:
        raise RuntimeError(f"received {result['received']} of {count}")
    return taken


def warm(pipeline: Any, env: Any) -> None:
    """Leave a lease queue, as the run before has: only a pipeline's first run waits for its own."""
    from airflow_broadway.producers.rabbitmq.link import Link
    from airflow_broadway.producers.rabbitmq.topology import Topology

    link = Link(pipeline.producer.address(env))
    topology = Topology(pipeline.producer)
    topology.ensure_returns(link)
    topology.leave_spare(link)
    link.close()


def staged(folder: str, ref: dict[str, Any]) -> tuple[Any, Any, str]:
    """A run's folder, its pipeline, and what its producer has of staging."""
    from airflow_broadway.core.broadway import Broadway
    from airflow_broadway.core.run import RunInfo
    from airflow_broadway.staging.run import StagedRun
    from airflow_broadway.staging.store import Store

    pipeline = Broadway.load(ref, RunInfo())
    store = Store.open(f"file://{folder}/staging")
    run = StagedRun(store, pipeline=pipeline.name, dag_id="bench", run_id="bench")
    return run, pipeline, f"{store.uri}/{pipeline.name}"


def apart(name: str, **given: Any) -> tuple[float, float, int]:
    """Seconds, seconds of CPU and peak memory of a function here, in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.rabbitmq", name, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
    value = json.loads(done.stdout.splitlines()[-1])
    return value["seconds"], value["cpu"], value["peak"]


def settle_all(given: dict[str, Any], messages: int) -> float:
    """Settle the generation of a process stage, every message acknowledged; seconds."""
    from airflow_broadway.core.custody import ACK, Settlement
    from airflow_broadway.core.producer import ProducerEnv

    run, pipeline, staging = staged(**given)
    [record] = run.generations()
    custodian = pipeline.producer.custodian(
        ProducerEnv(generation=record.generation, staging=staging)
    )
    began = time.perf_counter()
    report = custodian.settle(run.lease(record), Settlement(rest=ACK, expected=messages))
    seconds = time.perf_counter() - began
    custodian.close()
    if report.acked != messages:
        raise RuntimeError(f"settled {report}")
    return seconds


def figures(
    taken: dict[str, list[tuple[float, float, int]]], messages: int
) -> list[dict[str, Any]]:
    """Medians, and ratios to the ceiling of the same try."""
    made: list[dict[str, Any]] = []
    top = [seconds for seconds, _, _ in taken["ceiling"]]
    for name, tries in taken.items():
        rates = [messages / seconds for seconds, _, _ in tries]
        ratios = [best / seconds for best, (seconds, _, _) in zip(top, tries, strict=True)]
        figure: dict[str, Any] = {
            "name": f"rabbitmq.{name}",
            "value": round(statistics.median(rates)),
            "unit": "msg/s",
        }
        cpu = statistics.median(cpu for _, cpu, _ in tries)
        if cpu:
            figure["cpu_us"] = round(1e6 * cpu / messages, 1)
        peak = statistics.median(peak for _, _, peak in tries)
        if peak:
            figure["peak"] = int(peak)
        if name != "ceiling":
            figure["ratio"] = round(statistics.median(ratios), 2)
            figure["ratio_to"] = "rabbitmq.ceiling"
            figure["target"] = TARGETS[name]
        made.append(figure)
    return made


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    value = ceiling(**given) if sys.argv[1] == "ceiling" else process(**given)
    print(json.dumps({**value, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
