"""Subjects over Pub/Sub's stub: a project and a clock per case.

Unlike in production, there is one pull at a time, and none waits, so that all runs are the same.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from airflow_broadway import Broadway
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.testing.crashes.interceptor import Boundary
from airflow_broadway.testing.crashes.sink import call_in_fork
from airflow_broadway.testing.crashes.subject import DeadLetter
from tests.crashes.pubsub_calls import PubSub
from tests.crashes.pubsub_clocks import LEFT
from tests.crashes.receipt_subject import ReceiptSubject, common_options
from tests.crashes.subjects import MakeSubject
from tests.pubsub_server import Remote

#: Number of message keys.
_KEYS = 3
_WAIT = 60.0


@contextmanager
def open_subjects(*, ordered: bool = False) -> Iterator[MakeSubject]:
    """Yields a function that creates subjects, with or without message ordering."""
    # Loads the client once for all forks, without opening a channel.
    import_module("google.pubsub_v1")
    with tempfile.TemporaryDirectory(prefix="crashes-pubsub-") as name:
        clocks = Path(name)
        server = subprocess.Popen([sys.executable, "-m", "tests.crashes.pubsub_clocks", name])
        try:
            yield partial(_OnPubSub, _host(server, clocks), clocks, ordered)
        finally:
            server.kill()
            server.wait()


def _host(server: subprocess.Popen[bytes], clocks: Path) -> str:
    end = time.monotonic() + _WAIT
    while not (clocks / "port").exists():
        if server.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the stub of Pub/Sub did not start")
        time.sleep(0.02)
    return f"127.0.0.1:{(clocks / 'port').read_text()}"


class _OnPubSub(ReceiptSubject):
    """A pipeline over a subscription and a dead-letter topic."""

    # Pub/Sub's maximum.
    lease: ClassVar[float] = 600.0
    # Records of attempts are kept longer than Pub/Sub keeps a message.
    permanent: ClassVar[str] = r"^[^/]+/pubsub/[^/]+/(?:attempts|deaths)/"

    def __init__(
        self, host: str, clocks: Path, ordered: bool, pipeline: type[Broadway], folder: Path
    ) -> None:
        super().__init__(pipeline, folder)
        self._host = host
        self._ordered = ordered
        self._project = f"p{hashlib.md5(str(folder).encode()).hexdigest()[:12]}"
        self._clock = clocks / self._project
        self._clock_offset = 0.0
        self._call_in_fork(self._make)

    def close(self) -> None:
        self._clock.unlink(missing_ok=True)

    def boundaries(self) -> list[Boundary]:
        return [PubSub(), *super().boundaries()]

    def overrides(self) -> Mapping[str, Any]:
        options = common_options(self.pipeline.producer)
        # Without jitter, so that the number of requests is the same in every run.
        options = {**options, "retry": replace(options["retry"], jitter=0.0)}
        return {
            "producer": PubSubProducer(
                subscription=self._name("subscriptions", "queue"),
                dead_letter=self._name("topics", "dead"),
                conn_id=None,
                endpoint=f"http://{self._host}",
                lease=self.lease,
                receive_concurrency=1,
                message_ordering=self._ordered,
                **options,
            )
        }

    def pass_time(self, seconds: float) -> None:
        self._clock_offset += seconds
        self._clock.write_text(str(self._clock_offset))

    # -- clients have threads, so each is used in a separate process: this process forks ---------

    def _call_in_fork(self, do: Callable[[Remote], Any]) -> Any:
        return call_in_fork(
            lambda: do(Remote(self._host)), self.folder, self.folder / "log.txt", "the broker"
        )

    def _name(self, kind: str, name: str) -> str:
        return f"projects/{self._project}/{kind}/{name}"

    def _make(self, server: Remote) -> None:
        for name in ("queue", "dead"):
            server.publisher.create_topic(name=self._name("topics", name))
            server.subscriber.create_subscription(
                request={
                    "name": self._name("subscriptions", name),
                    "topic": self._name("topics", name),
                    "enable_message_ordering": self._ordered and name == "queue",
                }
            )

    def send(self, bodies: Sequence[bytes]) -> list[str]:
        messages = [
            {"data": body, **({"ordering_key": str(int(body) % _KEYS)} if self._ordered else {})}
            for body in bodies
        ]
        topic = self._name("topics", "queue")
        ids: list[str] = self._call_in_fork(lambda server: server.publish_all(topic, messages))
        return ids

    def waiting(self) -> int:
        request = {"subscription": self._name("subscriptions", "queue")}

        def left(server: Remote) -> int:
            return int(server.subscriber.get_subscription(request=request).labels[LEFT])

        result: int = self._call_in_fork(left)
        return result

    def letters(self) -> list[DeadLetter]:
        name = self._name("subscriptions", "dead")

        def read(server: Remote) -> list[list[str]]:
            attributes = ("broadway_message_id", "broadway_reason")
            return [
                [*(message.attributes.get(key, "") for key in attributes), message.data.decode()]
                for message in server.drain(name)
            ]

        # A kill between publishing a dead letter and acknowledging its original duplicates the dead
        # letter; the attribute identifies it.
        return [
            DeadLetter(key, True, reason, body.encode())
            for key, reason, body in self._call_in_fork(read)
        ]

    def group_of(self, place: int) -> str | None:
        return str(place % _KEYS) if self._ordered else None
