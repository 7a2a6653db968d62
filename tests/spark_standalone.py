"""A standalone cluster of Spark: a master and workers, from PySpark's own jars."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil
import pyspark

from scripts.local_airflow import free_port
from tests.cluster.hosts import Host
from tests.waiting import eventually

HOME = Path(pyspark.__file__).parent
#: Of a small executor; Spark itself asks for 450 MB.
MEMORY = "512m"


class Standalone:
    """The cluster; each worker has one core, for one executor.

    :param folder: Of logs and workers' files.
    :param address: Where the master listens, and workers that have no host of their own.
    :param hosts: Those of the workers.
    """

    def __init__(
        self,
        folder: Path,
        workers: int = 2,
        *,
        address: str = "127.0.0.1",
        hosts: Sequence[Host] = (),
    ) -> None:
        self._folder, self._workers = folder, workers
        self._address, self._hosts = address, hosts
        self.master = f"spark://{address}:{free_port()}"
        #: By name: ``master``, ``worker-0`` …
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        port = self.master.rpartition(":")[2]
        try:
            self._start("master", self._folder, "master.Master", "--port", port)
            self._wait("master", self._folder, "I have been elected leader")
            for number in range(self._workers):
                self.start_worker(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def start_worker(self, number: int) -> None:
        """Starts a worker, and waits until the master knows it."""
        name, host = f"worker-{number}", self._hosts[number] if self._hosts else None
        folder = host.folder if host else self._folder
        work = host.disk if host else self._folder
        own = ["--cores", "1", "--memory", MEMORY, "--work-dir", str(work / name)]
        self._start(name, folder, "worker.Worker", *own, self.master, host=host)
        self._wait(name, folder, "Successfully registered with master")

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            tree = [psutil.Process(process.pid)] if process.poll() is None else []
            for one in [*(child for p in tree for child in p.children(recursive=True)), *tree]:
                one.kill()
            process.wait()

    def executor(self, worker: str) -> psutil.Process:
        """Waits for the executor of a worker; returns its process."""
        found: list[psutil.Process] = []

        def look() -> bool:
            for process in psutil.Process(self.processes[worker].pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # or a zombie
                    if any("ExecutorBackend" in word for word in process.cmdline()):
                        found.append(process)
            return bool(found)

        eventually(look, 120.0)
        return found[0]

    def _start(
        self, name: str, folder: Path, program: str, *arguments: str, host: Host | None = None
    ) -> None:
        address = host.address if host else self._address
        command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{program}"]
        command += ["--host", address, "--webui-port", "0", *arguments]
        env = {
            **os.environ,
            "SPARK_HOME": str(HOME),
            "SPARK_LOCAL_IP": address,
            "SPARK_DAEMON_MEMORY": "192m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "PYSPARK_PYTHON": sys.executable,
        }
        log = folder / f"{name}.log"
        log.unlink(missing_ok=True)
        if host:
            self.processes[name] = host.start(name, command, env)
            return
        with log.open("wb") as file:
            self.processes[name] = subprocess.Popen(command, env=env, stdout=file, stderr=file)

    def _wait(self, name: str, folder: Path, line: str) -> None:
        log = folder / f"{name}.log"
        eventually(
            lambda: re.search(line, log.read_text()) or self.processes[name].poll() is not None,
            120.0,
        )
        assert self.processes[name].poll() is None, log.read_text()
