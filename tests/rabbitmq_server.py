"""A private RabbitMQ server for tests: own ports, data folder and node name; loopback only.

It also has operations without our package: fill, count and read queues.

``with RabbitServer.start(folder) as server:`` gives ``server.url``.  It ends by its process ids
only.  ``AIRFLOW_BROADWAY_RABBITMQ_URL`` names a server that runs already: it is used as it is, and
the tests that kill their broker are skipped.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika

from tests.server_process import Server, await_start, start_process

__all__ = ["RabbitServer", "find_server", "given_url"]

_PLACES = ("/usr/lib/rabbitmq/bin", "/opt/homebrew/sbin", "/usr/local/sbin", "/usr/sbin")


def given_url() -> str | None:
    """Returns the server named by the environment, if any."""
    return os.environ.get("AIRFLOW_BROADWAY_RABBITMQ_URL") or None


def find_server() -> Path | None:
    """Returns the ``rabbitmq-server`` script, if it is installed.

    The one of the package's own folder is preferred: that in ``/usr/sbin`` changes the user.
    """
    found = shutil.which("rabbitmq-server")
    for place in (*_PLACES, *([str(Path(found).parent)] if found else [])):
        script = Path(place) / "rabbitmq-server"
        if script.exists():
            return script
    return None


def free_port() -> int:
    """Returns an unused port of loopback.

    It is below the ephemeral ports, so it is still free when a killed server restarts.
    """
    for port in random.SystemRandom().sample(range(12_000, 32_000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port below 32,000 is free")


@dataclass
class RabbitServer(Server):
    """One server, and its operations.

    :param folder: Where it keeps everything; kept over :meth:`kill` and :meth:`run`.
    """

    folder: Path
    port: int = field(default_factory=free_port)
    management_port: int = field(default_factory=free_port)
    dist_port: int = field(default_factory=free_port)
    given: str | None = None
    plugins: str = "rabbitmq_management"
    process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, folder: Path) -> RabbitServer:
        """Starts a server, or uses the one named by the environment."""
        given = given_url()
        if given is not None:
            return cls(folder, given=given, management_port=15672)
        server = cls(folder)
        server.run()
        return server

    @property
    def url(self) -> str:
        """Its AMQP address."""
        return self.given or f"amqp://guest:guest@127.0.0.1:{self.port}/"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for proxies."""
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 5672

    @property
    def uri(self) -> str:
        """Its address without the password."""
        host, port = self.address
        return f"amqp://{host}:{port}"

    def connection(self, **given: Any) -> dict[str, Any]:
        """The Airflow connection of it, in Airflow's JSON form."""
        host, port = self.address
        login = {"login": "guest", "password": "guest"}
        return {"conn_type": "rabbitmq", "host": host, "port": port, **login, **given}

    @property
    def env(self) -> dict[str, str]:
        """The environment of the server and its tools."""
        f = self.folder
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith("RABBITMQ_")},
            "HOME": str(f),
            "RABBITMQ_HOME": str(f),
            "RABBITMQ_NODENAME": f"broadway{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self.dist_port),
            "RABBITMQ_MNESIA_BASE": str(f / "data"),
            "RABBITMQ_LOG_BASE": str(f / "log"),
            "RABBITMQ_CONFIG_FILE": str(f / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(f / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(f / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(f / "pid"),
            "RABBITMQ_CONF_ENV_FILE": str(f / "none"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none"
                " -kernel inet_dist_use_interface {127,0,0,1}"
            ),
            # Its own port mapper, so that none outlives it.
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }

    # -- queues --------------------------------------------------------------------------------

    @contextmanager
    def channel(self) -> Iterator[Any]:
        """A channel for a few calls, with a connection of its own."""
        with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
            yield connection.channel()

    def declare(self, queue: str, **arguments: Any) -> None:
        """Declares a durable queue."""
        with self.channel() as channel:
            channel.queue_declare(queue, durable=True, arguments=arguments)

    def fill(self, queue: str, bodies: Iterable[bytes]) -> None:
        """Publishes persistent messages to an empty queue, and waits until they are ready."""
        properties, count = pika.BasicProperties(delivery_mode=2), 0
        with self.channel() as channel:
            for body in bodies:
                channel.basic_publish("", queue, body, properties)
                count += 1
            while channel.queue_declare(queue, passive=True).method.message_count < count:
                time.sleep(0.05)

    def depth(self, queue: str) -> int | None:
        """Returns the ready messages of a queue, by AMQP, without delay; ``None``: no queue."""
        with self.channel() as channel:
            try:
                return int(channel.queue_declare(queue, passive=True).method.message_count)
            except pika.exceptions.ChannelClosedByBroker:
                return None

    def count(self, *queues: str) -> int:
        """Returns the ready messages of queues; 0 for missing queues."""
        return sum(self.depth(queue) or 0 for queue in queues)

    def get(self, queue: str) -> tuple[Any, bytes] | None:
        """Receives one message; returns its properties and body."""
        with self.channel() as channel:
            method, properties, body = channel.basic_get(queue, auto_ack=True)
            return None if method is None else (properties, body)

    def queue_names(self, prefix: str = "") -> list[str]:
        """Returns the names of queues, by the management API."""
        found = self.manage("GET", "queues?columns=name&disable_stats=true")
        return [queue["name"] for queue in found if queue["name"].startswith(prefix)]

    def manage(self, method: str, path: str, body: Any = None) -> Any:
        """Calls the management API."""
        request = urllib.request.Request(
            f"http://{self.address[0]}:{self.management_port}/api/{path}",
            method=method,
            headers={
                "Authorization": f"Basic {b64encode(b'guest:guest').decode()}",
                "Content-Type": "application/json",
            },
            data=None if body is None else json.dumps(body).encode(),
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    # -- life cycle ----------------------------------------------------------------------------

    def run(self, *, wait: float = 90.0) -> None:
        """Starts the server on its data, and waits until it answers."""
        script = find_server()
        if script is None:
            raise RuntimeError("RabbitMQ is not installed")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            f"management.tcp.ip = 127.0.0.1\nmanagement.tcp.port = {self.management_port}\n"
            "loopback_users.guest = true\ndisk_free_limit.absolute = 100MB\n"
            "vm_memory_high_watermark.absolute = 3GB\n"
        )
        # A refused dead letter is retried after 5 seconds, not 3 minutes.
        (self.folder / "advanced.config").write_text(
            "[{rabbit, [{dead_letter_worker_publisher_confirm_timeout, 5000}]}].\n"
        )
        (self.folder / "enabled_plugins").write_text(f"[{self.plugins}].\n")
        log = self.folder / "console.log"
        self.process = start_process([str(script)], log, env=self.env)
        name = "RabbitMQ"
        await_start(self.process, self._answers, log=log, name=name, stop=self.kill, wait=wait)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(self.address, timeout=1) as sock:
                sock.sendall(b"AMQP\x00\x00\x09\x01")
                return sock.recv(1) == b"\x01"
        except OSError:
            return False

    def control(self, *command: str) -> str:
        """Runs ``rabbitmqctl``; returns its output."""
        script = find_server()
        assert script is not None
        return subprocess.run(
            [script.with_name("rabbitmqctl"), "-n", self.env["RABBITMQ_NODENAME"], *command],
            env=self.env,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout

    def evaluate(self, expression: str) -> str:
        """Evaluates an Erlang expression on the node."""
        return self.control("eval", expression).strip()

    def stop_queue(self, name: str) -> None:
        """Ends a quorum queue's process: its users lose their connections."""
        self._of_queue("stop_server", name)

    def start_queue(self, name: str) -> None:
        """Starts a quorum queue's process again."""
        self._of_queue("restart_server", name)

    def _of_queue(self, function: str, name: str) -> None:
        process = f'{{list_to_atom("%2F_{name}"), node()}}'
        self.control("eval", f"ok = ra:{function}(quorum_queues, {process}).")

    @contextmanager
    def setting(self, **values: tuple[int, int]) -> Iterator[None]:
        """Settings of RabbitMQ, for channels that are opened meanwhile.

        :param values: Each setting's value, and what it is without this.
        """

        def given(place: int) -> str:
            calls = [f"application:set_env(rabbit, {k}, {v[place]})" for k, v in values.items()]
            return f"{', '.join(calls)}."

        self.control("eval", given(0))
        try:
            yield
        finally:
            self.control("eval", given(1))

    def kill(self) -> None:
        """``kill -9`` to the whole server: its process group, which is its alone."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Ends it, in order if it will."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        except ProcessLookupError:
            process.wait()
        # The shell that started the virtual machine may have gone before it.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        while self._answers():
            time.sleep(0.1)
