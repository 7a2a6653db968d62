"""A standalone cluster of Spark on loopback: a master and workers, from PySpark's own jars."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Self

import psutil
import pyspark

from scripts.local_airflow import free_port
from tests.waiting import eventually

HOME = Path(pyspark.__file__).parent
#: Of a small executor; Spark itself asks for 450 MB.
MEMORY = "512m"


class Standalone:
    """The cluster; each worker has one core, for one executor.

    :param folder: Of logs and workers' files.
    """

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self._folder, self._workers = folder, workers
        self.master = f"spark://127.0.0.1:{free_port()}"
        #: By name: ``master``, ``worker-0`` …
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        port = self.master.rpartition(":")[2]
        try:
            self._start("master", "master.Master", "--port", port)
            self._wait("master", "I have been elected leader")
            for number in range(self._workers):
                name = f"worker-{number}"
                own = ["--cores", "1", "--memory", MEMORY, "--work-dir", str(self._folder / name)]
                self._start(name, "worker.Worker", *own, self.master)
            for number in range(self._workers):
                self._wait(f"worker-{number}", "Successfully registered with master")
        except BaseException:
            self.__exit__()
            raise
        return self

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
            children = psutil.Process(self.processes[worker].pid).children(recursive=True)
            found.extend(p for p in children if any("ExecutorBackend" in w for w in p.cmdline()))
            return bool(found)

        eventually(look, 120.0)
        return found[0]

    def _start(self, name: str, program: str, *arguments: str) -> None:
        command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{program}"]
        command += ["--host", "127.0.0.1", "--webui-port", "0", *arguments]
        env = {
            **os.environ,
            "SPARK_HOME": str(HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "192m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "PYSPARK_PYTHON": sys.executable,
        }
        with (self._folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def _wait(self, name: str, line: str) -> None:
        log = self._folder / f"{name}.log"
        eventually(
            lambda: re.search(line, log.read_text()) or self.processes[name].poll() is not None,
            120.0,
        )
        assert self.processes[name].poll() is None, log.read_text()
