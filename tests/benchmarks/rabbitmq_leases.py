"""The cost of leased messages at a RabbitMQ: ``python -m tests.benchmarks.rabbitmq_leases``.

One run holds 100,000 messages of 200 bytes at a new server.  The broker reports its memory, the
file system the disk space.  The source queue is a classic queue, so that the folder ``quorum``
contains only the holding and dead-letter queues.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import ACK
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from tests.rabbitmq_server import RabbitServer

MESSAGES, BYTES = 100_000, 200
#: Seconds to wait for the broker's statistics, which it collects every 5 s.
FRESH = 11.0
QUEUE = "measured"


def main() -> None:
    """Measures and prints the table of the guide."""
    figures = measure_memory_and_disk()
    out = sys.stdout.write
    out(f"{MESSAGES:,} messages of {BYTES} bytes, held by one run (MiB)\n\n")
    out("| | |\n|---|---|\n")
    for name, figure in figures.items():
        out(f"| {name} | {figure} |\n")


def measure_memory_and_disk() -> dict[str, str]:
    """Returns the figures by name; sizes in MiB."""
    with tempfile.TemporaryDirectory(prefix="broadway-leases-") as folder, start_server() as server:
        time.sleep(FRESH)
        before, disk = memory(server), size(server.folder / "data")
        server.declare(QUEUE)
        server.fill(QUEUE, repeat(b"x" * BYTES, MESSAGES))
        time.sleep(FRESH)
        filled = memory(server)
        producer = RabbitMQProducer(queue=QUEUE, uri=server.uri, on_failure="retry")
        env = ProducerEnv(generation="g1", staging=f"file://{folder}")
        source = producer.source(env)
        measurements = 0
        while measurements < MESSAGES:
            measurements += len(source.secure(source.receive(2_000, timeout=10.0)))
        lease = source.lease
        time.sleep(FRESH)
        queue = server.manage("GET", f"queues/%2F/{lease.state['lease_queue']}")
        result = {
            "bundles in the holding queue": f"{queue['messages']:,}",
            "their bytes": mib(queue["message_bytes"]),
            "memory of the holding queue": mib(queue["memory"]),
            "memory of the broker above that when empty: source full": mib(filled - before),
            "… all leased": mib(memory(server) - before),
            "disk of the broker's quorum queues": mib(size(server.folder / "data", "quorum")),
            "disk of the broker above that when empty": mib(size(server.folder / "data") - disk),
        }
        source.close()
        custodian = producer.custodian(env)
        report = custodian.settle(lease, Settlement(rest=ACK, expected=MESSAGES))
        custodian.close()
        assert report.acked == MESSAGES, report
        time.sleep(FRESH)
        result["memory of the broker above that when empty: all settled"] = mib(
            memory(server) - before
        )
        return result


@contextmanager
def start_server() -> Iterator[RabbitServer]:
    folder = Path(tempfile.mkdtemp(prefix="broadway-rabbitmq-"))
    server = RabbitServer(folder)
    server.run()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def memory(server: RabbitServer) -> int:
    """Returns the memory of the broker's process in bytes, as reported by the broker."""
    [node] = server.manage("GET", "nodes")
    return int(node["mem_used"])


def size(folder: Path, part: str = "") -> int:
    """Returns the disk space of the files below a folder in bytes."""
    return sum(
        file.stat().st_blocks * 512
        for file in folder.rglob("*")
        if file.is_file() and part in str(file.relative_to(folder))
    )


def mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count >= 10 * 2**20 else f"{count / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
