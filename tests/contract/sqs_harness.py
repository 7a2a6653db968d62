"""SQS for the custody contract: moto's server on a manual clock.

Server, tests and the other processes of a test share one clock in a file: the real one, advanced by
all of their waits.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.testing.harness import Harness
from tests.server_process import at_end, session_folder
from tests.sqs_server import KEY, REGION, Connections, SqsServer


class SharedClock(SystemClock):
    """The real clock, advanced by the waits of all processes that share it."""

    def __init__(self, path: str) -> None:
        self.path = path
        if not os.path.exists(path):
            Path(path).write_bytes(struct.pack("d", 0.0))
        with open(path, "r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 8)

    @property
    def skipped(self) -> float:
        [seconds] = struct.unpack("d", self._shared[:8])
        return float(seconds)

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.skipped)

    def monotonic(self) -> float:
        return super().monotonic() + self.skipped

    def sleep(self, seconds: float) -> None:
        self._shared[:8] = struct.pack("d", self.skipped + seconds)


@cache
def moved_server() -> tuple[SqsServer, str]:
    """Starts a server on its own clock, once per process; returns it and the clock's file."""
    folder = session_folder("sqs-clock")
    path = str(folder / "clock")
    SharedClock(path)
    server = SqsServer(folder, command=("tests.contract.sqs_harness", path))
    server.run()
    at_end.callback(server.stop)
    return server, path


@cache
def _client(url: str) -> Any:
    import boto3

    session = boto3.session.Session()
    return session.client("sqs", region_name=REGION, endpoint_url=url, **KEY)


class SqsHarness(Harness):
    def __init__(
        self, url: str, clock: str, queue: str, dead: str, staging: str, lease: float = 60.0
    ) -> None:
        super().__init__(url, clock, queue, dead, staging, lease)
        self.lease = lease
        self.clock = SharedClock(clock)
        self._url = url
        self.queue = queue
        self._dead = dead
        self._staging = staging

    def producer(self) -> Producer:
        return SqsProducer(
            queue_url=self.queue,
            dead_letter=self._dead,
            lease=self.lease,
            wait_time_seconds=0,
            receive_concurrency=4,
        )

    def env(self, generation: str) -> ProducerEnv:
        return dataclasses.replace(
            super().env(generation), shared=self._staging, connections=Connections(self._url)
        )

    def send(self, bodies: Sequence[bytes]) -> None:
        client = _client(self._url)
        entries: list[dict[str, Any]] = []
        for place, body in enumerate(bodies):
            entries.append({"Id": str(place), "MessageBody": body.decode()})
            if self.queue.endswith(".fifo"):
                # Without groups every message has its own, and waits for no other.
                group = str(place % self.groups) if self.groups else uuid.uuid4().hex
                entries[-1] |= {"MessageGroupId": group, "MessageDeduplicationId": uuid.uuid4().hex}
        for start in range(0, len(entries), 10):
            part = entries[start : start + 10]
            answer = client.send_message_batch(QueueUrl=self.queue, Entries=part)
            assert not answer.get("Failed")


class _SharedTime:
    """The module ``time`` for the server."""

    monotonic, sleep = staticmethod(time.monotonic), staticmethod(time.sleep)

    def __init__(self, clock: SharedClock) -> None:
        self._clock = clock

    def time(self) -> float:
        return time.time() + self._clock.skipped


def main() -> None:
    """Serves on the shared clock, until killed."""
    from tests import sqs_moto

    clock = SharedClock(sys.argv.pop(1))
    setattr(sqs_moto, "time", _SharedTime(clock))  # noqa: B010 - a module of its own, replaced
    sqs_moto.main()


if __name__ == "__main__":
    main()
