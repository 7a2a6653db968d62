"""``make up``: a local Airflow with its UI on loopback, until Ctrl-C.

The port is 8080 (``PORT=9000 make up`` sets another) or the next free one.  With
``ARGS="--connect"``, starts a Spark Connect server, which the Spark tasks use.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from types import FrameType

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import DEFAULT_PORT, FLIGHTS_QUEUE, ROOT, airflow_env, home_of
from scripts.local_airflow import (
    LocalAirflow,
    LocalAirflowError,
    end_leftovers,
    free_port,
    kill_by_token,
)
from scripts.spark_connect import ConnectServer

#: Seconds within which all components must be healthy.
PATIENCE = 120.0


class _Interrupted(BaseException):
    """Raised on SIGINT, SIGTERM or SIGHUP; not an Exception, so that it is not caught."""


class _Interrupts:
    """Interrupts at the first signal; kills Airflow and exits immediately at the second one."""

    def __init__(self, airflow: LocalAirflow) -> None:
        self._airflow = airflow
        self._seen = 0

    def listen(self) -> None:
        # Also if SIGINT is ignored, as in a background job of a shell.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._seen += 1
        if self._seen == 1:
            raise _Interrupted
        if self._seen == 2:
            print("Killing it.", flush=True)
            # Not LocalAirflow.kill(): the signal may have interrupted it while it held a lock.
            kill_by_token(self._airflow.token)
            os._exit(1)


def main() -> int:
    """Runs Airflow until interrupted; returns 0 then."""
    parser = argparse.ArgumentParser(prog="make up", description=__doc__)
    parser.add_argument("--connect", action="store_true", help="with a Spark Connect server")
    connect = parser.parse_args().connect
    dags = ROOT / "dags"
    dags.mkdir(exist_ok=True)
    end_leftovers(home_of(ROOT))
    _create_queues()
    try:
        port = free_port(int(os.environ.get("PORT", DEFAULT_PORT)))
    except ValueError:
        print(f"PORT={os.environ['PORT']} is not a number.", file=sys.stderr)
        return 2
    env = airflow_env(port=port)
    server = ConnectServer(home_of(ROOT) / "connect") if connect else None
    if server is not None:
        spark = {"conn_type": "spark_connect", "host": "127.0.0.1", "port": server.port}
        env["AIRFLOW_CONN_SPARK_DEFAULT"] = json.dumps(spark)
    airflow = LocalAirflow(env, home_of(ROOT) / "logs" / "components")
    interrupts = _Interrupts(airflow)
    code = 0
    try:
        interrupts.listen()
        begun = time.monotonic()
        print("Starting Airflow; this takes about half a minute.", flush=True)
        if server is not None:
            server.start()
        airflow.start()
        airflow.wait_healthy(PATIENCE)
        print(_welcome(airflow, time.monotonic() - begun), flush=True)
        while True:
            time.sleep(1.0)
            airflow.check_alive()
    except _Interrupted:
        print("\nStopping Airflow.  Ctrl-C again kills it.", flush=True)
    except (LocalAirflowError, RuntimeError) as error:
        print(error, file=sys.stderr)
        code = 1
    finally:
        airflow.stop()
        if server is not None:
            server.kill()
    if code == 0:
        print("Stopped.  Runs and logs are kept: `make up` shows them again.", flush=True)
    return code


def _create_queues() -> None:
    """Creates the queues of the DAGs in ``dags/``: runs fail without their queue."""
    FLIGHTS_QUEUE.parent.mkdir(parents=True, exist_ok=True)
    with SqliteQueue(FLIGHTS_QUEUE, "flights") as queue:
        queue.create()


def _welcome(airflow: LocalAirflow, seconds: float) -> str:
    return f"""\
Airflow is healthy after {seconds:.0f} s.

  Open     {airflow.url}/dags
  Login    none: every client is an administrator; the port is open on this machine only

  Run      click a DAG, then Trigger (top right); then a square in its grid for that task's log
  DAGs     {airflow.env["AIRFLOW__CORE__DAGS_FOLDER"]}, read again every few seconds
  Logs     {airflow.log_dir}

Ctrl-C stops it."""


if __name__ == "__main__":
    sys.exit(main())
