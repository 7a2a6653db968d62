"""Spark's history server, as an administrator runs one next to Airflow."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark


@contextmanager
def history_server(events: Path, port: int, log: Path) -> Iterator[str]:
    """Serves the event logs of a folder on a port of loopback; gives the server's address."""
    options = {
        "spark.history.ui.port": port,
        "spark.history.fs.logDirectory": f"file://{events}",
        "spark.history.fs.update.interval": "1s",
    }
    env = {
        **os.environ,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HISTORY_OPTS": " ".join(f"-D{name}={value}" for name, value in options.items()),
    }
    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(program), "org.apache.spark.deploy.history.HistoryServer"],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(address, process, log)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with direct.open(address, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"Spark's history server does not answer:\n{log.read_text()[-3000:]}")
