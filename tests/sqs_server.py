"""A private SQS for tests: moto's server over HTTP, in a process of its own, on loopback only.

``with SqsServer.start(folder) as server:`` gives ``server.url``, the endpoint.  Its queues live in
that process's memory: they survive kills of other processes, and end with it.
``AIRFLOW_BROADWAY_SQS_URL`` names an endpoint that runs already (ElasticMQ, LocalStack): it is used
as it is.

``tests/sqs_moto.py`` is what runs there, and says what is changed of moto.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_broadway.core.model.connections import Connection
from scripts.local_airflow import free_port
from tests.server_process import Server, await_start, start_process

__all__ = ["KEY", "REGION", "Connections", "SqsServer", "given_url"]

REGION = "us-east-1"
#: moto takes any credentials; these are nobody's.
KEY = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}

ROOT = Path(__file__).resolve().parent.parent


def given_url() -> str | None:
    """Returns the endpoint named by the environment, if any."""
    return os.environ.get("AIRFLOW_BROADWAY_SQS_URL") or None


class Connections:
    """One connection under every id, to one endpoint.

    :param key: Access key id and secret key.
    :param extra: More of the connection's extras.
    """

    def __init__(self, url: str, *, key: Mapping[str, str] = KEY, **extra: Any) -> None:
        self._key = key
        self._extra = {"region_name": REGION, "endpoint_url": url, **extra}

    def get(self, conn_id: str) -> Connection:
        return Connection(
            conn_id=conn_id,
            conn_type="aws",
            login=self._key["aws_access_key_id"],
            password=self._key["aws_secret_access_key"],
            extra=self._extra,
        )


@dataclass
class SqsServer(Server):
    """One server, used without our package.

    :param folder: For its log.
    :param command: The module that serves, and its arguments before the port.
    """

    folder: Path
    port: int = field(default_factory=free_port)
    given: str | None = None
    command: tuple[str, ...] = ("tests.sqs_moto",)
    process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, folder: Path) -> SqsServer:
        """Starts a server, or uses the one named by the environment."""
        given = given_url()
        server = cls(folder, given=given)
        if given is None:
            server.run()
        return server

    @property
    def url(self) -> str:
        """Its endpoint."""
        return self.given or f"http://127.0.0.1:{self.port}"

    def connection(self, **extra: Any) -> dict[str, Any]:
        """The Airflow connection of it, in Airflow's JSON form."""
        return {
            "conn_type": "aws",
            "login": KEY["aws_access_key_id"],
            "password": KEY["aws_secret_access_key"],
            "extra": {"region_name": REGION, "endpoint_url": self.url, **extra},
        }

    def client(self, **config: Any) -> Any:
        """Opens a boto3 client; ``config`` is botocore's."""
        import boto3
        from botocore.config import Config

        options = {"region_name": REGION, "endpoint_url": self.url, "config": Config(**config)}
        return boto3.session.Session().client("sqs", **options, **KEY)

    def queue(self, name: str | None = None, **attributes: str) -> str:
        """Creates a queue; returns its URL."""
        name = name or f"queue-{uuid.uuid4().hex}"
        created = self.client().create_queue(QueueName=name, Attributes=attributes)
        return str(created["QueueUrl"])

    def depth(self, url: str) -> tuple[int, int, int]:
        """Returns the visible, in-flight and delayed messages of a queue."""
        answer = self.client().get_queue_attributes(QueueUrl=url, AttributeNames=["All"])
        number = "ApproximateNumberOfMessages{}".format
        visible, hidden, delayed = (
            int(answer["Attributes"][number(kind)]) for kind in ("", "NotVisible", "Delayed")
        )
        return visible, hidden, delayed

    # ------------------------------------------------------------------------------------- life
    def run(self, *, wait: float = 60.0) -> None:
        """Starts the server, and waits until it answers."""
        log = self.folder / "moto.log"
        command = [sys.executable, "-m", *self.command, str(self.port)]
        self.process = start_process(command, log, cwd=ROOT)
        name = "moto's server"
        await_start(self.process, self._answers, log=log, name=name, stop=self.stop, wait=wait)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/moto-api/data.json", timeout=5) as answer:
                return isinstance(json.load(answer), dict)
        except (OSError, ValueError, urllib.error.URLError):
            return False

    def stop(self) -> None:
        """Ends the server with its queues."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
