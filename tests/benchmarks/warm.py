"""Latency from sending a message to its row and its acknowledgement; runs are started by events.

Uses a real scheduler and triggerer, without a JVM, and polls the table and the queue every 20 ms.
``warm.<shape>.<queue>.<table>`` are seconds since the message was sent, ``…to.<mark>`` the parts
between successive marks: the backlog's ``event`` stored, run ``queued`` and ``running``, each task
``….queued`` and ``….started``, ``handled`` by the callback, ``row`` visible, ``acked``.
The first runs of a DAG are discarded, because its queue and trigger are new.

``….<task>.modules`` and ``….<task>.cpu`` are those of a task's process at its end, minus those of a
trivial task; ``….requests`` are a run's requests to Airflow's execution API, and ``….queries`` the
statements that the API server sends to the metadata database for them.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pika

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import airflow_env
from scripts.local_airflow import LocalAirflow, free_port
from scripts.spark_connect import ConnectServer
from tests.benchmarks.figures import Figures, median, temporary_folder
from tests.rabbitmq_server import RabbitServer

#: Shape, queue and table of each measured DAG.
CASES = (
    ("run", "sqlite", "parquet"),
    ("run", "sqlite", "delta"),
    ("run", "rabbitmq", "parquet"),
    ("staged", "sqlite", "parquet"),
    ("staged", "sqlite", "delta"),
    ("staged", "rabbitmq", "parquet"),
)
LIVE = (("run", "rabbitmq", "parquet"), ("staged", "rabbitmq", "parquet"))
#: Messages per second of ``warm.live``, and messages per call of send.
RATE, CHUNK = 1_000, 50
#: Number of discarded warm-up runs.
COLD = 2
#: The tasks of each shape, in order.
_STAGES = ("broadway.process", "broadway.batch.default")
TASKS = {"run": ("run",), "staged": _STAGES, "connect": (*_STAGES, "broadway.handle_batches")}
_DAGS = Path(__file__).parent / "warm_dags"
#: Airflow's local settings: writes a byte to the file ``queries`` for each statement.
_COUNT_QUERIES = """
import os, sys
from sqlalchemy import Engine, event

if "api-server" in sys.argv:
    file = os.open(os.environ["WARM_TABLES"] + "/queries", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    event.listen(Engine, "before_cursor_execute", lambda *_: os.write(file, b"."))
"""


def bench_warm(cases: Sequence[tuple[str, str, str]] = CASES, tries: int = 5) -> Figures:
    """Measures the latency of single messages."""
    figures: Figures = []
    with _open_bench() as world:
        world.run_bare()
        for case in cases:
            with world.case(*case) as dag:
                for number in range(COLD):
                    dag.one(number)
                dag.requests.clear()
                dag.queries.clear()
                marks = [dag.one(COLD + number) for number in range(tries)]
            name = "warm." + ".".join(case)
            requests = median(f"{name}.requests", dag.requests, "requests")
            queries = median(f"{name}.queries", dag.queries, "queries")
            figures += [requests, queries, *world.processes("_".join(case), name)]
            for end in ("row", "acked"):
                seconds = [mark[end] - mark["sent"] for mark in marks]
                figures.append(median(f"{name}.{end}", seconds, "s", digits=2))
            names = sorted(marks[0], key=lambda key: statistics.median(m[key] for m in marks))
            for before, after in pairwise(names):
                parts = [mark[after] - mark[before] for mark in marks]
                figures.append(median(f"{name}.to.{after}", parts, "s", digits=2))
    return figures


def bench_connect(tries: int = 5) -> Figures:
    """Measures the latency of single messages on a warm Spark Connect server."""
    return bench_warm((("connect", "sqlite", "parquet"),), tries)


def bench_live(seconds: float = 60.0) -> Figures:
    """Measures the latency under a constant load, and checks that every row exists once."""
    figures: Figures = []
    with _open_bench() as world:
        for case in LIVE:
            with world.case(*case) as dag:
                dag.one(-1)
                waited = sorted(dag.load(round(seconds * RATE)))
            for share in (50, 99):
                value = waited[min(len(waited) * share // 100, len(waited) - 1)]
                figures.append(
                    median(f"warm.live.{'.'.join(case)}.p{share}", [value], "s", digits=2)
                )
    return figures


class Rows:
    """Reads the newly committed rows of a table.

    :param folder: A ParquetFolder, or a Delta table.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: set[str] = set()

    def new(self) -> list[dict[str, Any]]:
        """Returns the rows committed since the last call."""
        import pyarrow.parquet as pq

        files = [path for path in self._files() if path not in self._known]
        self._known.update(files)
        return [
            row for path in files for row in pq.ParquetFile(self._folder / path).read().to_pylist()
        ]

    def _files(self) -> list[str]:
        commits = sorted((self._folder / "_delta_log").glob("*.json"))
        if not commits:
            return [path.name for path in self._folder.glob("*.parquet")]
        lines = [json.loads(line) for path in commits for line in path.read_text().splitlines()]
        return [line["add"]["path"] for line in lines if "add" in line]


class Case:
    """A DAG with its queue and its table.

    :param queries: A file with a byte for each statement of the API server.
    :param send: Sends messages.
    :param depth: Returns the number of messages at the broker.
    """

    def __init__(
        self,
        airflow: LocalAirflow,
        dag_id: str,
        tasks: Sequence[str],
        rows: Rows,
        queries: Path,
        send: Callable[[list[bytes]], object],
        depth: Callable[[], int],
    ) -> None:
        self._airflow, self._dag_id, self._tasks = airflow, dag_id, tasks
        self._rows, self._send, self._depth, self._queries = rows, send, depth, queries
        #: Number of requests to the execution API, and of the API server's queries, by run.
        self.requests: list[int] = []
        self.queries: list[int] = []

    def one(self, number: int) -> dict[str, float]:
        """Sends one message and waits for its run; returns the times of the marks."""
        log = self._airflow.log_dir / "api-server.log"
        start, before = log.stat().st_size, self._queries.stat().st_size
        marks = {"sent": time.time()}
        self._send([_body(number)])
        [row] = _poll(self._rows.new)
        marks["row"] = time.time()
        assert row["n"] == number, row
        _poll(lambda: not self._depth())
        marks["acked"] = time.time()
        time.sleep(2.0)  # the last requests follow
        self.queries.append(self._queries.stat().st_size - before)
        self.requests.append(log.read_bytes()[start:].count(b" path=/execution/"))
        return {**marks, "handled": row["handled"], **self._times_in_airflow()}

    def _times_in_airflow(self) -> dict[str, float]:
        runs = f"/dags/{self._dag_id}/dagRuns"
        [run] = self._airflow.api("GET", runs, order_by="-run_after", limit=1)["dag_runs"]
        run_id = run["dag_run_id"]
        state = self._airflow.wait_for_run(self._dag_id, run_id)
        assert state == "success", state
        [event] = self._airflow.api("GET", f"{runs}/{run_id}/upstreamAssetEvents")["asset_events"]
        run = self._airflow.dag_run(self._dag_id, run_id)
        times = {
            "event": event["timestamp"],
            "queued": run["queued_at"],
            "running": run["start_date"],
        }
        instances = {
            item["task_id"]: item for item in self._airflow.task_instances(self._dag_id, run_id)
        }
        for task in self._tasks:
            name = task.rpartition(".")[2]
            times[f"{name}.queued"] = instances[task]["queued_when"]
            times[f"{name}.started"] = instances[task]["start_date"]
            if task != self._tasks[-1]:
                times[f"{name}.ended"] = instances[task]["end_date"]
        return {name: datetime.fromisoformat(text).timestamp() for name, text in times.items()}

    def load(self, count: int) -> list[float]:
        """Sends at a constant rate; returns the seconds until each message's row was visible."""
        waited: dict[int, float] = {}
        sender = threading.Thread(target=self._feed, args=(count,), daemon=True)
        sender.start()
        deadline = time.monotonic() + count / RATE + 180.0
        while len(waited) < count and time.monotonic() < deadline:
            rows, now = self._rows.new(), time.time()
            for row in rows:
                assert row["n"] not in waited, f"a second row of message {row['n']}"
                waited[row["n"]] = now - row["sent"]
            time.sleep(0.05)
        assert len(waited) == count, f"{len(waited)} rows of {count} messages"
        sender.join()
        return list(waited.values())

    def _feed(self, count: int) -> None:
        started = time.monotonic()
        for start in range(0, count, CHUNK):
            time.sleep(max(0.0, started + start / RATE - time.monotonic()))
            self._send([_body(number) for number in range(start, min(start + CHUNK, count))])


class WarmBench:
    """An Airflow, the brokers, and the tables of the benchmark."""

    def __init__(self, airflow: LocalAirflow, server: RabbitServer, folder: Path) -> None:
        self._airflow, self._server, self._folder = airflow, server, folder

    def processes(self, dag_id: str, name: str) -> Figures:
        """Returns the medians of a DAG's task processes, minus those of a trivial task."""
        costs: dict[str, list[tuple[int, float]]] = {}
        for line in (self._folder / "tables" / "processes").read_text().splitlines():
            dag, task, modules, cpu = json.loads(line)
            if dag in (dag_id, "bare"):
                costs.setdefault(task.partition(".")[2] or task, []).append((modules, cpu))
        bare = [statistics.median(values) for values in zip(*costs.pop("nothing"), strict=True)]
        figures: Figures = []
        for task, values in costs.items():
            modules, cpu = zip(*values[COLD:], strict=True)
            own = [count - bare[0] for count in modules]
            figures.append(median(f"{name}.{task}.modules", own, "modules"))
            seconds = [value - bare[1] for value in cpu]
            figures.append(median(f"{name}.{task}.cpu", seconds, "s", digits=2))
        return figures

    def run_bare(self, times: int = 3) -> None:
        """Runs the trivial DAG."""
        self._airflow.wait_for_dag("bare")
        self._airflow.pause("bare", False)
        for _ in range(times):
            state = self._airflow.wait_for_run("bare", self._airflow.trigger("bare"))
            assert state == "success", state

    @contextmanager
    def case(self, shape: str, queue: str, table: str) -> Iterator[Case]:
        """Unpauses a DAG during its measurement."""
        name = f"{shape}_{queue}_{table}"
        folder = self._folder / "tables" / name
        if table == "delta":
            import deltalake
            import pyarrow as pa

            text, whole, number = pa.string(), pa.int64(), pa.float64()
            kinds: Any = {"message_id": text, "n": whole, "sent": number, "handled": number}
            schema = pa.schema(kinds)
            deltalake.DeltaTable.create(str(folder), schema=schema)
        with ExitStack() as stack:
            broker = stack.enter_context(getattr(self, f"_{queue}")(name))
            self._airflow.wait_for_dag(name)
            self._airflow.pause(name, False)
            stack.callback(self._airflow.pause, name)
            queries = folder.with_name("queries")
            yield Case(self._airflow, name, TASKS[shape], Rows(folder), queries, *broker)

    @contextmanager
    def _sqlite(self, name: str) -> Iterator[Any]:
        with SqliteQueue(self._folder / "queue.db", name) as queue:
            queue.create()
            yield queue.send, lambda: sum(queue.depth()[:4])

    @contextmanager
    def _rabbitmq(self, name: str) -> Iterator[Any]:
        self._server.declare(name)
        durable = pika.BasicProperties(delivery_mode=2)

        def send(bodies: list[bytes]) -> None:
            with self._server.channel() as channel:
                for body in bodies:
                    channel.basic_publish("", name, body, durable)

        def depth() -> int:
            # A message is either in this queue or in a holding queue.
            return self._server.count(name, *self._server.queue_names(f"broadway.held.{name}."))

        yield send, depth


@contextmanager
def _open_bench() -> Iterator[WarmBench]:
    with temporary_folder() as folder, RabbitServer.start(folder / "broker") as server:
        env = airflow_env(
            port=free_port(),
            home=folder / "airflow",
            dags=_DAGS,
            settings={"core.dags_are_paused_at_creation": "True"},
        )
        (folder / "tables").mkdir()
        (folder / "airflow/config").mkdir(parents=True)
        (folder / "airflow/config/airflow_local_settings.py").write_text(_COUNT_QUERIES)
        env["WARM_TABLES"] = str(folder / "tables")
        sqlite = {"conn_type": "broadway_sqlite", "host": str(folder / "queue.db")}
        env["AIRFLOW_CONN_WARM_SQLITE"] = json.dumps(sqlite)
        env["AIRFLOW_CONN_WARM_RABBITMQ"] = json.dumps(server.connection())
        connect = ConnectServer(folder / "connect")
        spark = {"conn_type": "spark_connect", "host": "127.0.0.1", "port": connect.port}
        env["AIRFLOW_CONN_WARM_CONNECT"] = json.dumps(spark)
        with connect, LocalAirflow(env, folder / "logs") as airflow:
            yield WarmBench(airflow, server, folder)


def _body(number: int) -> bytes:
    return json.dumps({"n": number, "sent": time.time()}).encode()


def _poll(look: Callable[[], Any]) -> Any:
    """Polls every 20 ms until the result is truthy; returns it."""
    deadline = time.monotonic() + 180.0
    while time.monotonic() < deadline:
        if result := look():
            return result
        time.sleep(0.02)
    raise RuntimeError("nothing came in 180 s")
