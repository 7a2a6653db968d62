"""Pub/Sub for tests, on loopback: Google's emulator, or rules of the tests' own behind gRPC.

Both are a :class:`PubSubServer`: ``server.host``, and what tests ask it without our package.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from airflow_broadway.core.clock import Clock
from scripts.local_airflow import free_port
from tests.server_process import Server, await_start, start_process

if TYPE_CHECKING:
    import grpc

__all__ = ["PROJECT", "Emulator", "PubSubServer", "Remote", "StubServer", "find_emulator"]

PROJECT = "broadway-tests"

#: Where Google's installers put the emulator, below the SDK's folder.
_IN_SDK = "platform/pubsub-emulator/bin/cloud-pubsub-emulator"
_SDKS = ("/usr/lib/google-cloud-sdk", "/usr/lib64/google-cloud-sdk", "/google-cloud-sdk")


def find_emulator() -> str | None:
    """Returns the program of the path or of an installed SDK; it needs Java."""
    if shutil.which("java") is None:
        return None
    gcloud = shutil.which("gcloud")
    home = str(Path.home() / "google-cloud-sdk")
    sdks = [*([str(Path(gcloud).resolve().parents[1])] if gcloud else []), *_SDKS, home]
    places = [os.path.join(sdk, _IN_SDK) for sdk in sdks]
    found = [place for place in places if os.access(place, os.X_OK)]
    return shutil.which("cloud-pubsub-emulator") or (found[0] if found else None)


class PubSubServer(Server):
    """A server, and its clients in this process."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def host(self) -> str:
        """Host and port, as ``PUBSUB_EMULATOR_HOST`` has it."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of a producer for this server."""
        return {"conn_id": None, "endpoint": f"http://{self.host}", "receive_timeout": 1.0}

    # -- clients of its own ---------------------------------------------------------------------

    @cached_property
    def _channel(self) -> grpc.Channel:
        import grpc

        # As in Google's client; the default refuses answers above 4 MiB.
        limit = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        return grpc.insecure_channel(self.host, options=limit)

    @cached_property
    def publisher(self) -> Any:
        """The client beneath Google's batching one."""
        from google.pubsub_v1 import PublisherClient
        from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport

        return PublisherClient(transport=PublisherGrpcTransport(channel=self._channel))

    @cached_property
    def subscriber(self) -> Any:
        from google.pubsub_v1 import SubscriberClient
        from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

        return SubscriberClient(transport=SubscriberGrpcTransport(channel=self._channel))

    def topic(self, name: str | None = None) -> str:
        """Creates a topic; returns its full name."""
        full = f"projects/{PROJECT}/topics/{name or f'topic-{uuid.uuid4().hex}'}"
        self.publisher.create_topic(name=full)
        return full

    def subscription(self, topic: str, name: str | None = None, **settings: Any) -> str:
        """Creates a subscription; returns its full name."""
        full = f"projects/{PROJECT}/subscriptions/{name or f'sub-{uuid.uuid4().hex}'}"
        self.subscriber.create_subscription(request={"name": full, "topic": topic, **settings})
        return full

    def publish(self, topic: str, bodies: Sequence[bytes], **more: Any) -> list[str]:
        """Publishes messages in order; returns their ids.

        :param more: Of each message: ``attributes``, ``ordering_key``.
        """
        return self.publish_all(topic, [{"data": body, **more} for body in bodies])

    def publish_all(self, topic: str, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Publishes whole messages, a thousand per request."""
        found: list[str] = []
        for start in range(0, len(messages), 1_000):
            request = {"topic": topic, "messages": messages[start : start + 1_000]}
            found += self.publisher.publish(request=request).message_ids
        return found

    def pull(self, subscription: str, most: int = 1_000) -> list[Any]:
        """Receives the messages that are available immediately, without acknowledging."""
        found: list[Any] = []
        while len(found) < most:
            request = {
                "subscription": subscription,
                "max_messages": min(1_000, most - len(found)),
                "return_immediately": True,
            }
            portion = self.subscriber.pull(request=request, timeout=30).received_messages
            if not portion:
                break
            found += portion
        return found

    def drain(self, subscription: str) -> list[Any]:
        """Receives and acknowledges the messages that are available immediately."""
        found: list[Any] = []
        while received := self.pull(subscription):
            ids = [message.ack_id for message in received]
            self.subscriber.acknowledge(request={"subscription": subscription, "ack_ids": ids})
            found += [message.message for message in received]
        return found


class Emulator(PubSubServer):
    """Google's emulator as a child process, in real time.

    :param folder: For its log.
    :param heap: The largest heap, in Java's notation.
    """

    kind = "emulator"

    def __init__(self, folder: Path, *, heap: str = "512m") -> None:
        self.folder = folder
        self.heap = heap
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def run(self, *, wait: float = 60.0) -> Self:
        """Starts the emulator, and waits until it answers."""
        program = find_emulator()
        if program is None:
            raise RuntimeError("Google's Pub/Sub emulator, or Java, is not installed")
        log = self.folder / "emulator.log"
        # The program is a script that starts Java.
        java = f"-Xmx{self.heap} -XX:TieredStopAtLevel=1"
        command = [program, "--host=127.0.0.1", f"--port={self.port}"]
        self.process = start_process(command, log, env={**os.environ, "JAVA_TOOL_OPTIONS": java})
        name = "the Pub/Sub emulator"
        await_start(self.process, self._answers, log=log, name=name, stop=self.stop, wait=wait)
        return self

    def _answers(self) -> bool:
        import grpc

        channel = grpc.insecure_channel(self.host)
        try:
            grpc.channel_ready_future(channel).result(timeout=1.0)
        except grpc.FutureTimeoutError:
            return False
        finally:
            channel.close()
        return True

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class StubServer(PubSubServer):
    """The rules of ``tests.pubsub_stub``, in this process, on any clock."""

    kind = "stub"

    def __init__(self, clock: Clock | None = None, **options: Any) -> None:
        from tests.pubsub_stub.server import Stub

        self._stub = Stub(clock, **options)
        self.broker = self._stub.broker

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._stub.port}"

    def stop(self) -> None:
        self._stub.stop()

    def held(self, subscription: str) -> list[Any]:
        """Returns the unacknowledged messages, oldest first, without receiving them."""
        with self.broker.changed:
            return [
                lease.message for lease in self.broker.subscriptions[subscription].left.values()
            ]

    def attempts(self, subscription: str) -> dict[str, int]:
        """Returns the deliveries of the unacknowledged messages, by id."""
        with self.broker.changed:
            left = self.broker.subscriptions[subscription].left.values()
            return {str(lease.message.message_id): lease.attempts for lease in left}


class Remote(PubSubServer):
    """A running server, as seen by another process."""

    kind = "remote"

    def __init__(self, host: str) -> None:
        self._host = host

    @property
    def host(self) -> str:
        return self._host

    def stop(self) -> None:
        """Leaves the server running."""
