"""The cost of archiving, and the speed of reading an interval of an archive.

``.kept`` is a process stage with an archive, compared with the same stage without one:
``archive.nothing`` with synthetic messages and trivial callbacks, where the archive has its largest
share, and ``archive.flights`` with the demo's.  ``.cpu`` is the CPU time per message.
``archive.read`` reads an interval of one hour as messages, in order; ``.peak`` is its memory.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

from airflow_broadway import Archive, Interval, Message
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.runs.sources.archived import ArchiveSource
from airflow_broadway.staging.archive.table import append, archive_folder, partition_of
from airflow_broadway.staging.archive.writer import ArchiveWriter
from airflow_broadway.staging.store import Store
from scripts.load_flights import flights as every_flight
from scripts.load_flights import load
from tests.benchmarks.figures import Figures, Measurement, median, memory, rate, temporary_folder
from tests.benchmarks.stages import run_stage
from tests.benchmarks.synthetic import BODY, SyntheticProducer

MESSAGES = 200_000
FLIGHTS = 100_000
INTERVAL = 1_000_000
SYNTHETIC = "tests.benchmarks.synthetic:SyntheticPipeline"
START = datetime(2013, 1, 1, tzinfo=UTC)


def bench_archive(
    messages: int = MESSAGES, interval: int = INTERVAL, flights: int = FLIGHTS, tries: int = 5
) -> Figures:
    """Measures all figures, alternating between the stages, so that noise affects both."""
    return [
        *compare_archiving("archive.nothing", partial(process_trivial, messages), tries),
        *compare_archiving("archive.flights", partial(process_flights, flights), tries),
        *read_interval(interval),
    ]


def compare_archiving(name: str, stage: Callable[[bool], Measurement], tries: int) -> Figures:
    """Compares a process stage with and without an archive."""
    pairs = [(stage(False), stage(True)) for _ in range(tries)]
    without, kept = ([pair[index] for pair in pairs] for index in (0, 1))
    bare, item = (
        [1e6 * measurement.cpu / measurement.messages for measurement in side]
        for side in (without, kept)
    )
    return [
        median(name, [measurement.rate for measurement in without], "msg/s"),
        median(
            f"{name}.kept",
            [measurement.rate for measurement in kept],
            "msg/s",
            of=name,
            ratios=[b.rate / a.rate for a, b in pairs],
        ),
        median(f"{name}.cpu", bare, "us", digits=2),
        median(
            f"{name}.kept.cpu",
            item,
            "us",
            digits=2,
            of=f"{name}.cpu",
            ratios=[b / a for a, b in zip(bare, item, strict=True)],
        ),
    ]


def process_trivial(messages: int, kept: bool) -> Measurement:
    """Measures synthetic messages with a trivial callback."""
    options = {"producer": {"messages": messages}, "archive": {} if kept else None}
    with temporary_folder() as folder:
        arguments = {"folder": str(folder), "ref": {"class": SYNTHETIC, "options": options}}
        done = run_stage("process", max_messages=messages, **arguments)
    return Measurement(messages, done.seconds, done.cpu)


def process_flights(messages: int, kept: bool) -> Measurement:
    """Measures the demo's messages and callback with the embedded queue."""
    with temporary_folder() as folder:
        queue = SqliteQueue(folder / "queue.db", "flights")
        load(queue, every_flight(messages))
        producer = {"path": queue.path, "conn_id": None}
        options = {"producer": producer, "archive": {} if kept else None}
        ref = {"class": "flights_pipeline:Flights", "options": options}
        done = run_stage("process", folder=str(folder), ref=ref, max_messages=messages)
        queue.close()
    return Measurement(messages, done.seconds, done.cpu)


def read_interval(messages: int) -> Figures:
    """Measures reading an hour of an archive."""
    with temporary_folder() as folder:
        store = Store.open(f"file://{folder}/staging")
        fill(store, messages)
        env = ProducerEnv(
            pipeline="b",
            store=store,
            interval=Interval(START, START + timedelta(hours=1)),
            owner={"dag_id": "d"},
        )
        started = time.perf_counter()
        source = ArchiveSource(env, Archive())
        count = 0
        while messages_read := source.receive(1_000, timeout=0.0):
            count += len(messages_read)
        seconds = time.perf_counter() - started
    if count != messages:
        raise RuntimeError(f"read {count} of {messages} messages")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [rate("archive.read", messages, seconds), memory("archive.read", peak)]


def fill(store: Store, messages: int) -> None:
    step = timedelta(hours=1) / messages
    own, archive = store.folder("own"), archive_folder(store, "b")
    with ArchiveWriter(own, "hour", SyntheticProducer(), Archive()) as writer:
        for number in range(messages):
            at = START + step * (number * 7919 % messages)
            writer.add([Message(BODY, message_id=f"m-{number}", received_at=at)])
        [file] = writer.close()
    target = f"{partition_of(file.hour)}/hour.parquet"
    own.copy(file.path, archive, target)
    append(archive, "hour", [file._replace(path=target)], START)
