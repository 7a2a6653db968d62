"""The cost of keeping an archive, and the speed of reading an interval of it.

``.kept`` is a process stage whose messages are kept, to be compared with the same stage without an
archive: ``archive.nothing`` on messages that cost nothing and callbacks that do nothing, where the
share is the largest that it can be, ``archive.flights`` on the demo's.  ``.cpu`` is the processor
time of a message.  ``archive.read`` reads an interval of an hour, written beforehand, in order and
as messages; ``.peak`` is its memory.
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
from tests.benchmarks.figures import Figures, Took, folder_of_its_own, median, memory, rate
from tests.benchmarks.made_up import BODY, MadeUpProducer
from tests.benchmarks.stages import run_stage

MESSAGES = 200_000
FLIGHTS = 100_000
INTERVAL = 1_000_000
MADE_UP = "tests.benchmarks.made_up:OnNothing"
START = datetime(2013, 1, 1, tzinfo=UTC)


def bench_archive(
    messages: int = MESSAGES, interval: int = INTERVAL, flights: int = FLIGHTS, tries: int = 5
) -> Figures:
    """All figures; the stages in turn, so that what else the machine does falls on both."""
    return [
        *compared("archive.nothing", partial(nothing_done, messages), tries),
        *compared("archive.flights", partial(flights_handled, flights), tries),
        *reading(interval),
    ]


def compared(name: str, stage: Callable[[bool], Took], tries: int) -> Figures:
    """A process stage that archives its messages next to the same without an archive."""
    pairs = [(stage(False), stage(True)) for _ in range(tries)]
    without, kept = ([pair[index] for pair in pairs] for index in (0, 1))
    bare, item = ([1e6 * took.cpu / took.messages for took in side] for side in (without, kept))
    return [
        median(name, [took.rate for took in without], "msg/s"),
        median(
            f"{name}.kept",
            [took.rate for took in kept],
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


def nothing_done(messages: int, kept: bool) -> Took:
    """Messages that cost nothing, and a callback that does nothing."""
    options = {"producer": {"messages": messages}, "archive": {} if kept else None}
    with folder_of_its_own() as folder:
        arguments = {"folder": str(folder), "ref": {"class": MADE_UP, "options": options}}
        done = run_stage("process", max_messages=messages, **arguments)
    return Took(messages, done.seconds, done.cpu)


def flights_handled(messages: int, kept: bool) -> Took:
    """The demo's messages and callback, at the embedded queue."""
    with folder_of_its_own() as folder:
        queue = SqliteQueue(folder / "queue.db", "flights")
        load(queue, every_flight(messages))
        producer = {"path": queue.path, "conn_id": None}
        options = {"producer": producer, "archive": {} if kept else None}
        ref = {"class": "flights_pipeline:Flights", "options": options}
        done = run_stage("process", folder=str(folder), ref=ref, max_messages=messages)
        queue.close()
    return Took(messages, done.seconds, done.cpu)


def reading(messages: int) -> Figures:
    """An hour of an archive, read to its end."""
    with folder_of_its_own() as folder:
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
        while found := source.receive(1_000, timeout=0.0):
            count += len(found)
        seconds = time.perf_counter() - started
    if count != messages:
        raise RuntimeError(f"read {count} of {messages} messages")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [rate("archive.read", messages, seconds), memory("archive.read", peak)]


def fill(store: Store, messages: int) -> None:
    step = timedelta(hours=1) / messages
    own, archive = store.folder("own"), archive_folder(store, "b")
    with ArchiveWriter(own, "hour", MadeUpProducer(), Archive()) as writer:
        for number in range(messages):
            at = START + step * (number * 7919 % messages)
            writer.add([Message(BODY, message_id=f"m-{number}", received_at=at)])
        [file] = writer.close()
    target = f"{partition_of(file.hour)}/hour.parquet"
    own.copy(file.path, archive, target)
    append(archive, "hour", [file._replace(path=target)], START)
