"""``make demo``: drain a queue of 336,776 flights through Airflow and Spark, and account for each.

Fills a new queue, starts a real Airflow (``scripts.local_airflow``), and triggers the DAG
``flights`` until the queue is empty.  Then compares the queue, the output and the ack sensor's
report with the data, and prints the result; ``build/demo.json`` has the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.staging.names import encode_name
from scripts.airflow_env import DEFAULT_PORT, FLIGHTS_QUEUE, ROOT, airflow_env, home_of
from scripts.demo_report import Expected, Run, display_path, make_report, print_report
from scripts.demo_screen import Screen
from scripts.load_flights import FLIGHTS, add_arguments, flights, load
from scripts.local_airflow import ApiError, LocalAirflow, LocalAirflowError, free_port

#: The DAG by its sink.
DAGS = {"parquet": "flights", "delta": "delta_flights"}

#: The folder of the queue and the output, next to the report.
FOLDER = FLIGHTS_QUEUE.parent

#: Seconds between two requests of the run's state.
PAUSE = 0.5

#: Seconds within which a run must end.
PATIENCE = 1_800.0


#: The columns that its pipeline returns.
_TEXTS = ("message_id", "batcher", "origin", "flight", "tailnum", "dest")
_TIMES = ("scheduled_at", "departed_at")
_NUMBERS = ("dep_delay", "arr_delay", "air_time", "distance", "hour")
_FIELDS: list[Any] = [
    *(pa.field(name, pa.string()) for name in _TEXTS),
    *(pa.field(name, pa.timestamp("us", tz="UTC")) for name in _TIMES),
    *(pa.field(name, pa.int32()) for name in _NUMBERS),
]
ROWS = pa.schema(_FIELDS)


class DemoError(RuntimeError):
    """The demo failed; the message has the reason."""


class Demo:
    """One demo, from an empty queue to the report.

    :param folder: The folder of the queue and the output; replaces those of an earlier demo.
    :param home: AIRFLOW_HOME.
    :param messages: The number of flights; ``None``: all.
    :param seed: Selects random flights.
    :param sink: A name of :data:`DAGS`.
    """

    def __init__(
        self,
        screen: Screen,
        folder: Path,
        home: Path,
        *,
        messages: int | None,
        seed: int | None,
        sink: str = "parquet",
    ) -> None:
        self.screen = screen
        self.sink, self.dag_id = sink, DAGS[sink]
        #: The pipeline's name, and the folder of its runs.
        self._pipeline = {"parquet": "Flights", "delta": "DeltaFlights"}[sink]
        self.folder = folder
        self.home = home
        self.output = folder / "output"
        self.messages = messages
        self.seed = seed
        self.expected = Expected()
        self.queue = SqliteQueue(folder / FLIGHTS_QUEUE.name, "flights")
        self.seconds: dict[str, float] = {}
        connection = {"conn_type": "broadway_sqlite", "host": self.queue.path}
        env = {
            **airflow_env(port=free_port(DEFAULT_PORT), home=home),
            "AIRFLOW_CONN_FLIGHTS_QUEUE": json.dumps(connection),
        }
        # Nothing needs the triggerer here.
        parts = ("api-server", "scheduler", "dag-processor")
        self.airflow = LocalAirflow(env, home / "logs" / "components", components=parts)
        self._running: str | None = None

    def run(self) -> dict[str, Any]:
        """Fills the queue, runs the DAG until it is empty, and returns the report."""
        begun = time.monotonic()
        # First, because it fails if another Airflow of this checkout runs, which may use the queue.
        self.airflow.start()
        self._fill()
        self.screen.step("Starting Airflow")
        self.airflow.wait_healthy()
        self.airflow.wait_for_dag(self.dag_id)
        self._end_old_runs()
        self.seconds["start"] = time.monotonic() - begun
        self.screen.step(f"Airflow is healthy at {self.airflow.url}")
        runs = list(self._drain())
        self.seconds["total"] = time.monotonic() - begun
        return make_report(self.expected, runs, self.queue, self.output, self.seconds)

    def stop(self) -> None:
        """Stops Airflow; a running run fails, and its messages are released."""
        self.screen.close()
        try:
            if self._running is not None:
                self.airflow.set_run_state(self.dag_id, self._running, "failed")
        except (LocalAirflowError, OSError):
            pass  # it does not respond; the next demo ends the run
        finally:
            self.airflow.stop()

    # ------------------------------------------------------------------------------------ steps
    def _fill(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.output, ignore_errors=True)
        for old in self.folder.glob(f"{FLIGHTS_QUEUE.name}*"):
            old.unlink()
        self.queue.create()
        if self.sink == "delta":
            self._create_table()
        total = FLIGHTS if self.messages is None else min(self.messages, FLIGHTS)
        begun = time.monotonic()
        source = self.expected.count(flights(self.messages, self.seed))
        sent = load(self.queue, source, progress=lambda n: self.screen.loading(n, total))
        self.seconds["load"] = time.monotonic() - begun
        self.screen.step(f"Sent {sent:,} flights to {display_path(Path(self.queue.path))}")

    def _create_table(self) -> None:
        """Creates the Delta Lake table, which a sink does not.

        :raises DemoError: If Delta Lake's jars for Spark are missing.
        """
        if not any((ROOT / "build" / "tables").glob("delta-*.jar")):
            raise DemoError(
                "Spark needs Delta Lake's jars, and there are none in build/tables: run"
                " scripts/setup.sh --tables, which needs mvn"
            )
        from deltalake import DeltaTable

        DeltaTable.create(self.output / "flights", schema=ROWS, partition_by=["origin"])

    def _end_old_runs(self) -> None:
        """Fails the runs that a killed demo or `make up` left: their queue is deleted."""
        path = f"/dags/{self.dag_id}/dagRuns"
        response = self.airflow.api("GET", path, state=["queued", "running"])
        for run in response["dag_runs"]:
            self.airflow.set_run_state(self.dag_id, run["dag_run_id"], "failed")
        self.airflow.pause(self.dag_id, paused=False)

    def _drain(self) -> Iterator[Run]:
        """Runs the DAG until the queue has nothing left; yields each run."""
        while True:
            # At least once, also with an empty queue.
            run = self._run_once()
            yield run
            if run.state != "success":
                return
            depth = self.queue.depth()
            if not depth.ready and not depth.delayed and not depth.leased:
                return
            if not run.received:
                if not depth.delayed:
                    raise DemoError(
                        f"run {run.run_id} received nothing, and the queue still has"
                        f" {depth.ready:,} messages ready and {depth.leased:,} leased"
                    )
                time.sleep(1.0)

    def _run_once(self) -> Run:
        run_id = self._running = self.airflow.trigger(self.dag_id, {"output": str(self.output)})
        self.screen.step(f"Triggered the DAG {self.dag_id}, run {run_id}")
        # The run's staging folder, for the progress and the report.
        folder = self.home / "broadway" / self._pipeline / self.dag_id / encode_name(run_id)
        deadline = time.monotonic() + PATIENCE
        while True:
            dag_run, tasks = self._describe_run(run_id)
            self.screen.running(
                tasks, self.queue.depth(), sent=self.expected.sent, batches=_batches(folder)
            )
            if dag_run["state"] in ("success", "failed"):
                break
            if time.monotonic() > deadline:
                raise DemoError(f"run {run_id} is not finished after {PATIENCE:g} s")
            time.sleep(PAUSE)
        self._running = None
        self.screen.step(f"The run's state is {dag_run['state']}")
        return Run(dag_run, tasks, _ack_report(folder))

    # Airflow may respond slowly on a busy machine.
    @retry(
        retry=retry_if_exception_type((ApiError, OSError)),
        stop=stop_after_attempt(5),
        wait=wait_fixed(1.0),
        reraise=True,
    )
    def _describe_run(self, run_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Returns the run and its task instances."""
        self.airflow.check_alive()
        return self.airflow.dag_run(self.dag_id, run_id), self.airflow.task_instances(
            self.dag_id, run_id
        )


def _ack_report(folder: Path) -> Mapping[str, Any]:
    """Reads the ack sensor's report; empty if there is none."""
    try:
        return dict(json.loads((folder / "report.json").read_text()))
    except FileNotFoundError:
        return {}


def _batches(folder: Path) -> tuple[int, int]:
    """Counts the batches with an outcome, and the planned batches."""
    handled = sum(1 for _ in folder.glob("outcomes/*/*/*.json"))
    planned = 0
    for plan in folder.glob("batches/*/*/*/plan.jsonl"):
        with plan.open() as lines, contextlib.suppress(ValueError):  # incomplete
            planned += json.loads(lines.readline())["batches"]
    return handled, planned


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs the demo; returns 0 if every message is accounted for."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--keep", action="store_true", help="leave Airflow running afterwards, until Ctrl-C"
    )
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="the folder of the queue and the output"
    )
    parser.add_argument("--home", type=Path, default=home_of(ROOT), help="Airflow's home")
    parser.add_argument("--sink", choices=sorted(DAGS), default="parquet", help="of its rows")
    options = parser.parse_args(None if arguments is None else list(arguments))
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    screen = Screen(console)
    demo = None
    try:
        if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
            raise DemoError("Spark needs Java, which is not installed: `make demo` installs it")
        demo = Demo(
            screen,
            options.folder.resolve(),
            options.home.resolve(),
            messages=options.messages,
            seed=options.seed,
            sink=options.sink,
        )
        report = demo.run()
        screen.close()
        path = demo.folder.with_suffix(".json")
        path.write_text(json.dumps(report, indent=2) + "\n")
        print_report(report, path, console)
        if report["mistakes"]:
            logs = display_path(demo.home / "logs" / f"dag_id={demo.dag_id}")
            raise DemoError("\n  ".join(["", *report["mistakes"], f"The tasks' logs: {logs}"]))
        if options.keep:
            console.print(
                f"\nAirflow keeps running at {demo.airflow.url}/dags/{demo.dag_id}; Ctrl-C."
            )
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(1.0)
                    demo.airflow.check_alive()
    except KeyboardInterrupt:
        screen.close()
        console.print("\nStopping Airflow.")
        return 130
    except (DemoError, LocalAirflowError, BroadwayError, RuntimeError, OSError) as error:
        screen.close()
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    finally:
        if demo is not None:
            demo.stop()
    return 0


def _interrupt(number: int, frame: object) -> None:
    # A second signal must not interrupt the cleanup.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
