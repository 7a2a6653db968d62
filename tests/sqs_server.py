"""A private SQS for tests: moto's server over HTTP, in a process of its own, on loopback only.

``with SqsServer.start(folder) as server:`` gives ``server.url``, the endpoint.  Its queues live in
that process's memory: they survive whoever is killed beside it, and end with it.
``AIRFLOW_BROADWAY_SQS_URL`` names an endpoint that runs already (ElasticMQ, LocalStack): it is used
as it is.

``tests/sqs_moto.py`` is what runs there, and says what is changed of moto.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from airflow_broadway.core.custody.producer import Connection
from scripts.local_airflow import free_port

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

__all__ = ["KEY", "REGION", "Connections", "SqsServer", "given_url"]

REGION = "us-east-1"
#: moto takes any credentials; these are nobody's.
KEY = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}

ROOT = Path(__file__).resolve().parent.parent


def given_url() -> str | None:
    """The endpoint that the environment names, if any."""
    return os.environ.get("AIRFLOW_BROADWAY_SQS_URL") or None


class Connections:
    """The connection to one endpoint, whatever is asked for.

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
class SqsServer:
    """One server, and what tests ask it without our package.

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
        """Start one, or take the one that the environment names."""
        given = given_url()
        server = cls(folder, given=given)
        if given is None:
            server.run()
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

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

    def client(self, **config: Any) -> SQSClient:
        """A boto3 client of its own; ``config`` is botocore's."""
        import boto3
        from botocore.config import Config

        made: SQSClient = boto3.session.Session().client(
            "sqs", region_name=REGION, endpoint_url=self.url, config=Config(**config), **KEY
        )
        return made

    def queue(self, name: str | None = None, **attributes: str) -> str:
        """Make a queue, and return its URL."""
        name = name or f"queue-{uuid.uuid4().hex}"
        return self.client().create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]  # type: ignore[arg-type]

    def depth(self, url: str) -> tuple[int, int, int]:
        """Messages of a queue that are visible, in flight and delayed."""
        told = self.client().get_queue_attributes(QueueUrl=url, AttributeNames=["All"])
        visible, hidden, delayed = (
            int(told["Attributes"][f"ApproximateNumberOfMessages{which}"])  # type: ignore[index]
            for which in ("", "NotVisible", "Delayed")
        )
        return visible, hidden, delayed

    # ------------------------------------------------------------------------------------- life
    def run(self, *, wait: float = 60.0) -> None:
        """Start the server and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "moto.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.command, str(self.port)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + wait
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                tail = (self.folder / "moto.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"moto's server did not start: {tail}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/moto-api/data.json", timeout=5) as answer:
                return isinstance(json.load(answer), dict)
        except (OSError, ValueError, urllib.error.URLError):
            return False

    def stop(self) -> None:
        """End it, with all of its queues."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
