"""A local Spark Connect server on loopback, for ``make up`` and tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Self

from scripts.local_airflow import free_port

#: Timeout of the start in seconds.
PATIENCE = 120.0
_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_STARTED = "Spark Connect server started"


class ConnectServer:
    """A Spark Connect server with ``local[2]``.

    :param folder: The folder of its log and files.
    :param conf: Additional settings of Spark.
    """

    def __init__(self, folder: Path, conf: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"sc://127.0.0.1:{self.port}"
        self._conf = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            **(conf or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server and waits until it accepts connections.

        :raises RuntimeError: If it does not start; with the end of its log.
        """
        home = Path(str(import_module("pyspark").__file__)).parent
        command = [str(home / "bin" / "spark-submit"), "--class", _CLASS, "--master", "local[2]"]
        command += [word for item in self._conf.items() for word in ("--conf", "=".join(item))]
        command += ["--driver-java-options", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"]
        env = {**os.environ, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}
        env["PYSPARK_PYTHON"] = sys.executable
        env.pop("PYTHONPATH", None)  # sessions bring their code
        log = self._folder / "log"
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, "spark-internal"], cwd=self._folder, env=env, stdout=file, stderr=file
            )
        end = time.monotonic() + PATIENCE
        while _STARTED not in log.read_text(errors="replace"):
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"Spark Connect did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kills the server with SIGKILL, like the OOM killer."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Stops it in good order, as for an update."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(PATIENCE)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
