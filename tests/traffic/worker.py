"""The worker process: executes runs by commands.

:mod:`tests.traffic.workers` starts it.  It reads commands from a socket, one line of JSON each, and
writes a line in response.  Tests send it signals, stop, resume and kill it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from airflow_broadway.adapters.host import MAX_SHUTDOWN
from airflow_broadway.core.local.run import LocalRun
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.runs.ports import Ports, Task, producer_env
from airflow_broadway.runs.process import Process
from airflow_broadway.runs.python_batches import PythonBatches
from airflow_broadway.runs.sweep import sweep
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from tests.traffic.fault_injection import inject_faults
from tests.traffic.pipelines import PIPELINES, broken_transformer

DAG = "traffic"


class TimedOut(BaseException):
    """Simulates ``AirflowTaskTimeout``: a signal handler raises it in the main thread."""


class _Connections:
    def __init__(self, known: Mapping[str, Mapping[str, Any]]) -> None:
        self._known = known

    def get(self, conn_id: str) -> Connection:
        return Connection(conn_id=conn_id, **self._known[conn_id])


class _Run:
    """Executes the run of a command."""

    def __init__(self, command: Mapping[str, Any]) -> None:
        place = command["place"]
        self.name: str = command["run"]
        self._command = command
        producer = {**place["options"], **command.get("producer", {})}
        if producer.pop("broken_transformer", False):
            producer["transformer"] = broken_transformer
        context = {"sink": place["sink"], "run": self.name, **command.get("context", {})}
        kind = PIPELINES[place["kind"]]
        if "named" in command:  # the pipeline was renamed
            kind = type(command["named"], (kind,), {})
        self._pipeline = kind(producer=producer, context=context)
        running = command.get("running", ())
        self._ports = Ports(
            connections=_Connections(place["connections"]),
            is_over=lambda run_id: run_id not in running,
            max_shutdown=MAX_SHUTDOWN,
        )
        self._task = Task(dag_id=DAG, run_id=self.name, task_id="process")
        self._staged = StagedRun(
            Store.open(place["staging"]), pipeline=self._pipeline.name, dag_id=DAG, run_id=self.name
        )
        self._stopped = ""
        self._stop: Callable[[str], object] = lambda reason: None
        #: The report of the run.
        self.report: dict[str, Any] | None = None

    def stop(self, *_: object) -> None:
        """Stops receiving."""
        self._stopped = "stopped"
        self._stop("stopped")

    def local(self) -> None:
        """Runs the pipeline like ``run_local``."""
        with self._timeout():
            env = self._env()
            stop = Stop(env.clock, self._pipeline.shutdown, lambda: self._stopped)
            with stop.on_sigterm():
                report = LocalRun(self._pipeline, env, stop=stop).pull(Budget(**self._budget))
        settled = report.settled.to_json()
        self.report = {
            **settled,
            "received": report.received,
            "settle_failed": settled["failed"],
            "balanced": report.balanced,
        }

    def staged(self) -> None:
        """Runs the tasks of a task group one after another."""
        self._sweep()
        try:
            self._handle()
        finally:
            self.ack()

    def unsettled(self) -> None:
        """Runs the tasks of a task group without the sensor."""
        self._sweep()
        self._handle()

    def _handle(self) -> None:
        process = Process(
            self._staged,
            self._pipeline,
            env=self._env(),
            budget=Budget(**self._budget),
            ports=self._ports,
        )
        self._stop = process.stop
        with _on(signal.SIGTERM, self.stop):
            with self._timeout():
                reference = process.run()
            if reference["batchers"]:
                plan = plan_batches(
                    self._staged,
                    self._pipeline,
                    "default",
                    [reference["generation"]],
                    try_label="1",
                )
                PythonBatches(self._staged, self._pipeline, plan, ports=self._ports).run()

    def ack(self) -> None:
        """Settles the run like the sensor."""
        settler = RunWatcher(self._staged, self._pipeline, ports=self._ports)
        try:
            settler.settle(final=True)
            report = settler.report(failed_tasks=[])
        finally:
            settler.close()
        self.report = {**report["totals"], "balanced": report["balanced"]}

    @property
    def _budget(self) -> dict[str, Any]:
        budget: dict[str, Any] = self._command.get("budget", {})
        return budget

    @contextmanager
    def _timeout(self) -> Iterator[None]:
        def expire(*_: object) -> None:
            raise TimedOut

        with _on(signal.SIGALRM, expire):
            signal.setitimer(signal.ITIMER_REAL, self._command.get("timeout", 0.0))
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _env(self) -> Any:
        return producer_env(
            self._pipeline,
            self._ports,
            generation=uuid.uuid4().hex,
            owner=self._task.owner(),
            store=self._staged.store,
        )

    def _sweep(self) -> None:
        """Releases the messages of dead runs: the first step of a process task."""
        sweep(self._staged, self._pipeline, self._task, self._ports)


@contextmanager
def _on(number: int, handler: Callable[..., object]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _execute(command: Mapping[str, Any]) -> dict[str, Any]:
    """Executes a command; returns the run's report and error."""
    raised, report, writes = "", None, 0
    started = time.monotonic()
    try:
        run = _Run(command)
        with inject_faults(command.get("faults", {})) as written, _on(signal.SIGUSR1, run.stop):
            try:
                getattr(run, command["flow"])()
            finally:
                report, writes = run.report, written.all
    except BaseException as error:
        logging.getLogger(__name__).info("run %s raised", command["run"], exc_info=True)
        raised = f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - started, 3)
    return {
        "run": command["run"],
        "report": report,
        "raised": raised,
        "seconds": seconds,
        "writes": writes,
    }


def serve(connection: socket.socket) -> None:
    """Executes commands until the socket is closed."""
    for number in (signal.SIGUSR1, signal.SIGTERM):  # a signal may arrive after the run
        signal.signal(number, signal.SIG_IGN)
    with connection.makefile("rw") as lines:
        print(json.dumps({"pid": os.getpid()}), file=lines, flush=True)
        while line := lines.readline():
            print(json.dumps(_execute(json.loads(line))), file=lines, flush=True)


def main() -> None:
    """Imports all clients once, then forks a worker for each socket that it receives.

    A worker must not import modules: a timeout that interrupts an import leaves it broken.
    """
    for client in (
        "boto3",
        "confluent_kafka",
        "fsspec",
        "google.pubsub_v1",
        "pika",
        "pyarrow.parquet",
    ):
        import_module(client)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        force=True,  # Airflow's handler logs to the original stdout
    )
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        while True:
            log, sockets, _, _ = socket.recv_fds(parent, 4096, 1)
            if not sockets:
                return
            [connection] = sockets
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                file = os.open(log.decode(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                os.dup2(file, 1)
                os.dup2(file, 2)
                parent.close()
                try:
                    serve(socket.socket(fileno=connection))
                finally:
                    os._exit(0)
            os.close(connection)


if __name__ == "__main__":
    main()
