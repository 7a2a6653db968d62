"""``make demo``: drain a queue of 336,776 flights through Airflow and Spark, and account for each.

A fresh queue is filled, a real Airflow started (``scripts.local_airflow``), and the DAG
``flights`` triggered until the queue is empty.  Then the queue, the output and the ack sensor's
report are read, compared with the data itself, and shown; ``build/demo.json`` has the same.
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
from scripts.demo_report import Expected, Run, make_report, show, shown
from scripts.demo_screen import Screen
from scripts.load_flights import FLIGHTS, add_arguments, flights, load
from scripts.local_airflow import ApiError, LocalAirflow, LocalAirflowError, free_port

#: The DAG by its sink.
DAGS = {"parquet": "flights", "delta": "delta_flights"}

#: The folder of queue and output, next to the report.
FOLDER = FLIGHTS_QUEUE.parent

#: Seconds between two looks at the run.
PAUSE = 0.5

#: Seconds after which a run is given up.
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
    """The demo cannot go on; the message has the reason."""


class Demo:
    """One demo, from an empty queue to the report.

    :param folder: Where the queue and the output go, in place of an earlier demo's.
    :param home: AIRFLOW_HOME.
    :param messages: How many flights; all if ``None``.
    :param seed: Choose them at random by it.
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
        #: The name of its pipeline, the folder of its runs.
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
        # The triggerer has nothing to do here.
        parts = ("api-server", "scheduler", "dag-processor")
        self.airflow = LocalAirflow(env, home / "logs" / "components", components=parts)
        self._running: str | None = None

    def run(self) -> dict[str, Any]:
        """Fills the queue, runs the DAG until it is empty, and returns the report."""
        begun = time.monotonic()
        # First of all, because it makes sure that no other Airflow of this checkout is at work on
        # the queue that is about to be replaced.
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
        """Stops Airflow; a run that is still going ends as failed, and its messages go back."""
        self.screen.close()
        try:
            if self._running is not None:
                self.airflow.set_run_state(self.dag_id, self._running, "failed")
        except (LocalAirflowError, OSError):
            pass  # it does not answer any more; the next start of the demo sees to the run
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
        wanted = FLIGHTS if self.messages is None else min(self.messages, FLIGHTS)
        begun = time.monotonic()
        source = self.expected.watch(flights(self.messages, self.seed))
        sent = load(self.queue, source, progress=lambda n: self.screen.loading(n, wanted))
        self.seconds["load"] = time.monotonic() - begun
        self.screen.step(f"Sent {sent:,} flights to {shown(Path(self.queue.path))}")

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
        """Ends what a killed demo, or an interrupted `make up`, left: its queue is no more."""
        path = f"/dags/{self.dag_id}/dagRuns"
        response = self.airflow.api("GET", path, state=["queued", "running"])
        for run in response["dag_runs"]:
            self.airflow.set_run_state(self.dag_id, run["dag_run_id"], "failed")
        self.airflow.pause(self.dag_id, paused=False)

    def _drain(self) -> Iterator[Run]:
        """Runs the DAG until the queue has nothing left; yields each run."""
        while True:
            # At least once: an empty queue makes a run too.
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
        # What the run stages there is read for the progress, and its report at the end.
        folder = self.home / "broadway" / self._pipeline / self.dag_id / encode_name(run_id)
        deadline = time.monotonic() + PATIENCE
        while True:
            dag_run, tasks = self._look(run_id)
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

    # A busy machine's Airflow may not answer at once.
    @retry(
        retry=retry_if_exception_type((ApiError, OSError)),
        stop=stop_after_attempt(5),
        wait=wait_fixed(1.0),
        reraise=True,
    )
    def _look(self, run_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Describes the run and its tasks."""
        self.airflow.check_alive()
        return self.airflow.dag_run(self.dag_id, run_id), self.airflow.task_instances(
            self.dag_id, run_id
        )


def _ack_report(folder: Path) -> Mapping[str, Any]:
    """The report that the ack sensor left, whether or not it failed; empty if it left none."""
    try:
        return dict(json.loads((folder / "report.json").read_text()))
    except FileNotFoundError:
        return {}


def _batches(folder: Path) -> tuple[int, int]:
    """How many batches of a run have an outcome, and how many are planned so far."""
    handled = sum(1 for _ in folder.glob("outcomes/*/*/*.json"))
    planned = 0
    for plan in folder.glob("batches/*/*/*/plan.jsonl"):
        with plan.open() as lines, contextlib.suppress(ValueError):  # it is just being written
            planned += json.loads(lines.readline())["batches"]
    return handled, planned


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs the demo; 0 if every message is accounted for."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--keep", action="store_true", help="leave Airflow running afterwards, until Ctrl-C"
    )
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="where the queue and the output go"
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
            raise DemoError("Spark needs Java, and there is none here: `make demo` sees to that")
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
        show(report, path, console)
        if report["mistakes"]:
            logs = shown(demo.home / "logs" / f"dag_id={demo.dag_id}")
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
    # A second signal must not break the clearing up.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
