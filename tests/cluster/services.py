"""The services of the cluster, which hosts share: PostgreSQL, brokers and an S3 server."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import s3fs

from scripts.local_airflow import free_port
from tests.faults.proxy import Proxy
from tests.kafka_server import ApacheKafka, find_jars
from tests.rabbitmq_server import RabbitServer, find_server
from tests.s3_server import S3Server, s3_server
from tests.sqs_server import SqsServer

BUCKET = "cluster"


class ServiceMissing(RuntimeError):
    """A required program is not installed or fails; the message names it."""


class PostgreSQL:
    """A new PostgreSQL server with an empty database ``airflow``.

    :param address: The address on which it listens.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self._data, self._address, self._port = folder / "data", address, free_port()
        self._bin = find_postgres()
        if os.geteuid() == 0 and shutil.which("unshare") is None:
            raise ServiceMissing("PostgreSQL does not run as root: start this as another user")
        # PostgreSQL does not run as root, not even as the root of a user namespace.
        as_user = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
        self._as_user = as_user if os.geteuid() == 0 else ()
        folder.mkdir(parents=True)
        self._call("initdb", "-D", str(self._data), "-U", "airflow", "-A", "trust", "-N")
        with (self._data / "pg_hba.conf").open("a") as file:
            file.write(f"host all all {address}/24 trust\n")
        self.start()
        self._call("createdb", "-h", address, "-p", str(self._port), "-U", "airflow", "airflow")

    @property
    def url(self) -> str:
        """The database's URL for SQLAlchemy."""
        return f"postgresql+psycopg2://airflow@{self._address}:{self._port}/airflow"

    @property
    def connection(self) -> dict[str, Any]:
        """Returns the fields of an Airflow connection to the database."""
        server = {"host": self._address, "port": self._port}
        return {**server, "login": "airflow", "schema": "airflow"}

    def start(self) -> None:
        """Starts the server, and waits until it accepts connections."""
        options = f"-c listen_addresses={self._address} -p {self._port} -c fsync=off"
        options += " -c unix_socket_directories= -c max_connections=200"
        log = str(self._data.parent / "postgresql.log")
        self._call("pg_ctl", "-D", str(self._data), "-w", "-l", log, "-o", options, "start")

    def restart(self) -> None:
        """Stops the server, which closes its connections, and starts it again."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Stops the server, which closes its connections."""
        self._call("pg_ctl", "-D", str(self._data), "-m", "fast", "-w", "stop")

    def _call(self, program: str, *arguments: str) -> None:
        command = [*self._as_user, str(self._bin / program), *arguments]
        calls = self._data.parent / "calls.log"
        with calls.open("ab") as log:
            code = subprocess.call(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        if code:
            raise ServiceMissing(f"PostgreSQL's {program} failed: see {calls}")


def find_postgres() -> Path:
    """Returns the folder of PostgreSQL's programs.

    :raises ServiceMissing: If it is not installed.
    """
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    initdb = shutil.which("initdb")
    for folder in [*folders, *([Path(initdb).resolve().parent] if initdb else [])]:
        if all((folder / name).exists() for name in ("initdb", "pg_ctl", "createdb")):
            return folder
    raise ServiceMissing("PostgreSQL is not installed: apt-get install postgresql")


class Services(NamedTuple):
    """The running services.

    :param broker: A proxy to RabbitMQ for the hosts.
    :param sqs_gate: A proxy to SQS for the hosts.
    :param kafka: ``None`` if Maven could not resolve it.
    :param s3_gate: A proxy to the S3 server for all clients.
    """

    postgres: PostgreSQL
    rabbitmq: RabbitServer
    broker: Proxy
    sqs: SqsServer
    sqs_gate: Proxy
    kafka: ApacheKafka | None
    s3: S3Server
    s3_gate: Proxy

    def bucket(self) -> s3fs.S3FileSystem:
        """Creates an s3fs file system for the bucket."""
        return s3fs.S3FileSystem(**self.s3.options())


@contextmanager
def run_services(folder: Path, address: str) -> Iterator[Services]:
    """Starts the services; they end with the context.

    :param address: The address on which they listen.
    :raises ServiceMissing: If a program is not installed.
    """
    if find_server() is None:
        raise ServiceMissing("RabbitMQ is not installed: apt-get install rabbitmq-server")
    with ExitStack() as stack:
        postgres = PostgreSQL(folder / "postgresql", address)
        stack.callback(postgres.stop)
        rabbitmq = stack.enter_context(RabbitServer(folder / "rabbitmq"))
        rabbitmq.run()
        broker = stack.enter_context(Proxy(rabbitmq.address, host=address))
        sqs = stack.enter_context(SqsServer.start(folder))
        sqs_gate = stack.enter_context(Proxy(("127.0.0.1", sqs.port), host=address))
        kafka = None
        if find_jars():
            kafka = stack.enter_context(ApacheKafka(folder / "kafka", address=address))
            kafka.run()
        s3 = stack.enter_context(s3_server())
        parts = urlsplit(s3.endpoint)
        local = (str(parts.hostname), int(parts.port or 0))
        gate = stack.enter_context(Proxy(local, host=address))
        services = Services(postgres, rabbitmq, broker, sqs, sqs_gate, kafka, s3, gate)
        services.bucket().mkdir(BUCKET)
        yield services
