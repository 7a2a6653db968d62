"""Spark drivers that tests kill and pause: forks of a process that holds one JVM for all of them.

Tests may have a session of their own, which no fork could share.  So the forks are not theirs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.unit.runs.steps import Point, deadly
from tests.unit.spark.session import tables_conf

ROOT = Path(__file__).parents[1]


class Drivers:
    """Starts drivers, one at a time, or the next one while another is paused.

    :param folder: An empty folder, for their log and their settings.
    :param env: More of the drivers' environment.
    """

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        log = folder / "log"
        conf = "".join(f"{name} {value}\n" for name, value in tables_conf().items())
        (folder / "spark-defaults.conf").write_text(conf)
        with log.open("a") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark_drivers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                bufsize=1,
                cwd=ROOT,
                env={**os.environ, "SPARK_CONF_DIR": str(folder), **(env or {})},
            )
        assert self._read() == "ready", log.read_text()

    def start(
        self, arguments: list[str], point: Point | None = None, by: int = signal.SIGKILL
    ) -> tuple[int, int]:
        """Runs a driver to its end, or until it is paused; returns its pid and :meth:`wait`'s.

        :param arguments: Those of :func:`airflow_broadway.spark.job.main`.
        :param point: The moment at which it sends itself the signal.
        """
        strike = None if point is None else [list(point[:3]), int(by)]
        return self._ask("start", arguments, strike)

    def resume(self, pid: int) -> int:
        """Lets a paused driver go on to its end; returns its exit code."""
        os.kill(pid, signal.SIGCONT)
        return self._ask("wait", pid)[1]

    def _ask(self, *request: Any) -> tuple[int, int]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        pid, code = json.loads(self._read())
        return pid, code

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """Ends the JVM."""
        self._process.communicate(timeout=60.0)


def main() -> None:
    """Serves :class:`Drivers`."""
    from airflow_broadway.testing.crashes.spark import warm_spark

    import_module("airflow_broadway.spark.application")  # once, for all forks
    with warm_spark():
        print("ready", flush=True)
        for line in sys.stdin:
            kind, *given = json.loads(line)
            pid = _fork(*given) if kind == "start" else given[0]
            _, status = os.waitpid(pid, os.WUNTRACED)
            stopped = os.WIFSTOPPED(status)
            print(
                json.dumps([pid, 0 if stopped else os.waitstatus_to_exitcode(status)]), flush=True
            )


def _fork(arguments: list[str], strike: Any) -> int:
    from airflow_broadway.testing.crashes.spark import run_driver

    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.dup2(2, 1)  # standard output has the answers
        with nullcontext() if strike is None else deadly(Point(*strike[0]), strike[1]):
            code = run_driver(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
