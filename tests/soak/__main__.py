"""``make soak``: millions of messages through overlapping runs of a real Airflow.

A sender keeps RabbitMQ's queue filled.  Two runs are active at all times.  Rows are counted from
outside.  A window is a tenth of the runs, in the order in which they end: its messages per second,
microseconds of its tasks' processor time per message, staged bytes per message, and, in MiB, the
peak memory of each kind of task and the memory of Airflow's components and of the broker at its
end.  The last line has the ratios of the last three windows to the first three.

The exit code is 1 if a message has no row, or two.  ``build/soak.json`` has the windows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pika
import psutil
import pyarrow.parquet as pq

from scripts.airflow_api import FINISHED
from scripts.airflow_env import ROOT, airflow_env
from scripts.local_airflow import LocalAirflow, free_port
from tests.benchmarks.figures import temporary_folder
from tests.nothing_left import nothing_left_behind
from tests.rabbitmq_server import RabbitServer
from tests.race.brokers import payload

RESULT = ROOT / "build" / "soak.json"
DAGS = Path(__file__).parent / "dags"
QUEUE = "soak"
ACTIVE_RUNS = 2
WINDOWS = 10
COMPONENTS = ("api-server", "scheduler", "dag-processor")
MIB = 2**20

#: A figure's name, and its value.
Window = dict[str, float]
#: By run and task: its processor seconds, its peak bytes, and the messages that it handled.
Costs = dict[str, dict[str, dict[str, float]]]


def main() -> int:
    """Runs the soak; returns 1 if a row is missing or repeated."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--run", type=int, default=200_000, help="messages of a run")
    args = parser.parse_args()
    rows, windows = soak(args.messages, args.run)
    lost, doubled = rows.compare()
    drift = compare_thirds(windows)
    print_windows([*windows, drift])
    print(f"{args.messages:,} messages: {lost:,} lost, {doubled:,} doubled")
    RESULT.parent.mkdir(exist_ok=True)
    result = {"messages": args.messages, "lost": lost, "doubled": doubled, "windows": windows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(lost or doubled))


class RowCounter:
    """Counts the rows of each message in a folder of Parquet files.

    :param messages: Messages are numbered from 0 to ``messages - 1``.
    """

    def __init__(self, folder: Path, messages: int) -> None:
        self._folder = folder
        self._counts = np.zeros(messages, np.uint8)
        self._read: set[Path] = set()

    def update(self) -> int:
        """Reads the files that were committed since the last call; returns the number of rows."""
        for path in sorted(set(self._folder.glob("*.parquet")) - self._read):
            numbers = pq.ParquetFile(path).read(["n"])["n"].to_numpy()
            np.add.at(self._counts, numbers, 1)
            self._read.add(path)
        return int(self._counts.sum(dtype=np.int64))

    def compare(self) -> tuple[int, int]:
        """Returns how many messages have no row, and how many rows are repetitions."""
        rows = self.update()
        present = int(np.count_nonzero(self._counts))
        return len(self._counts) - present, rows - present


class Soak:
    """An Airflow whose runs empty a queue, and their figures.

    :param folder: Has AIRFLOW_HOME, and ``rows`` and ``costs.jsonl`` of the DAG.
    """

    def __init__(self, airflow: LocalAirflow, server: RabbitServer, folder: Path) -> None:
        self._airflow, self._server, self._folder = airflow, server, folder
        #: The ended runs in this order: each one's id, and the figures at its end.
        self._ended: dict[str, Window] = {}

    def run(self, rows: RowCounter, messages: int, per_run: int) -> list[Window]:
        """Sends messages, and starts runs until each has a row; returns the windows.

        :raises RuntimeError: If a run failed, or messages are left that runs do not receive.
        """
        sender = threading.Thread(target=self._send, args=(messages, per_run), daemon=True)
        sender.start()
        begin, empty = time.monotonic(), 0
        active: set[str] = set()
        while (count := rows.update()) < messages or active:
            self._airflow.check_alive()
            for run_id in self._finished(active):
                active.remove(run_id)
                seconds = time.monotonic() - begin
                self._ended[run_id] = {"seconds": seconds, **self._measure()}
                received = self._costs()[run_id]["process"]["handled"]
                print(f"  {seconds:,.0f} s: {received:,} received, {count:,} rows", file=sys.stderr)
                empty = 0 if received else empty + 1
            if empty > 2 * ACTIVE_RUNS:
                raise RuntimeError(
                    f"{messages - count:,} messages have no row, and are not received"
                )
            while len(active) < ACTIVE_RUNS and count < messages:
                active.add(self._airflow.trigger("soak"))
            time.sleep(1.0)
        sender.join()
        return group_runs(self._ended, self._costs())

    def _finished(self, active: set[str]) -> list[str]:
        states = {run_id: self._airflow.dag_run("soak", run_id)["state"] for run_id in active}
        finished = [run_id for run_id, state in states.items() if state in FINISHED]
        for run_id in finished:
            if states[run_id] != "success":
                raise RuntimeError(f"run {run_id} ended as {states[run_id]}")
        return finished

    def _send(self, messages: int, per_run: int) -> None:
        """Keeps messages for one more run than are active in the queue."""
        durable = pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent)
        step = 10_000
        for start in range(0, messages, step):
            while (self._server.depth(QUEUE) or 0) > (ACTIVE_RUNS + 1) * per_run:
                time.sleep(0.2)
            with self._server.channel() as channel:
                for number in range(start, min(start + step, messages)):
                    channel.basic_publish("", QUEUE, payload(number), durable)

    def _measure(self) -> Window:
        broker = self._server.process
        pids = {name: self._airflow.processes[name].pid for name in COMPONENTS}
        if broker is not None:
            pids["rabbitmq"] = broker.pid
        files = (self._folder / "airflow" / "broadway").rglob("*")
        staged = sum(path.stat().st_size for path in files if path.is_file())
        return {"staged": staged, **{name: resident(pid) / MIB for name, pid in pids.items()}}

    def _costs(self) -> Costs:
        costs: Costs = {}
        for line in (self._folder / "costs.jsonl").read_text().splitlines():
            row = json.loads(line)
            costs.setdefault(row.pop("run_id"), {})[row.pop("task")] = row
        return costs


def resident(pid: int) -> int:
    """Returns the resident bytes of a process and its descendants."""
    root = psutil.Process(pid)
    total = 0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def group_runs(ended: Mapping[str, Window], costs: Costs) -> list[Window]:
    """Returns the figures of each tenth of the runs.

    :param ended: Of each run, in the order of their ends, the figures at its end: ``seconds``,
        ``staged`` bytes, and the MiB of each component.
    """
    runs = list(ended)
    size = max(1, len(runs) // WINDOWS)
    windows: list[Window] = []
    before: Window = {"seconds": 0.0, "staged": 0.0}
    for start in range(0, len(runs) - len(runs) % size, size):
        names = runs[start : start + size]
        tasks = [costs[name] for name in names]
        messages = sum(run["process"]["handled"] for run in tasks)
        last = dict(ended[names[-1]])
        cpu = sum(task["cpu"] for run in tasks for task in run.values())
        windows.append(
            {
                "messages": messages,
                "msg/s": messages / (last["seconds"] - before["seconds"]),
                "cpu us": 1e6 * cpu / messages,
                "staged B": (last["staged"] - before["staged"]) / messages,
                **{
                    f"{name} peak": max(run[name]["peak"] for run in tasks if name in run) / MIB
                    for name in tasks[0]
                },
                **{name: last[name] for name in last.keys() - before.keys()},
            }
        )
        before = {name: last[name] for name in before}
    return windows


def compare_thirds(windows: Sequence[Window]) -> Window:
    """Returns the medians of the last three windows, divided by those of the first three."""
    return {
        name: statistics.median(window[name] for window in windows[-3:])
        / statistics.median(window[name] for window in windows[:3])
        for name in windows[0]
    }


def print_windows(lines: Sequence[Window]) -> None:
    """Prints a table; the last line is of ratios."""
    names = list(lines[0])
    print("  ".join(f"{name:>13}" for name in names))
    for number, line in enumerate(lines):
        digits = 2 if number == len(lines) - 1 else 0
        print("  ".join(f"{line[name]:>13,.{digits}f}" for name in names))


def soak(messages: int, per_run: int) -> tuple[RowCounter, list[Window]]:
    """Starts Airflow and a broker, and brings messages into rows."""
    with temporary_folder() as folder, RabbitServer.start(folder / "broker") as server:
        server.declare(QUEUE)
        (folder / "rows").mkdir()
        rows = RowCounter(folder / "rows", messages)
        env = {
            **airflow_env(port=free_port(), home=folder / "airflow", dags=DAGS),
            "AIRFLOW_CONN_SOAK": json.dumps(server.connection()),
            "SOAK_FOLDER": str(folder),
            "SOAK_RUN": str(per_run),
        }
        with LocalAirflow(env, folder / "logs", components=COMPONENTS) as airflow:
            airflow.wait_for_dag("soak")
            airflow.pause("soak", False)
            windows = Soak(airflow, server, folder).run(rows, messages, per_run)
        rows.update()
    return rows, windows


if __name__ == "__main__":
    with nothing_left_behind():
        sys.exit(main())
