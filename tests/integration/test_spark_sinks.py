"""Spark batchers with a sink: each message's rows are in it exactly once, even after a crash."""

from __future__ import annotations

import signal
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pyarrow.dataset as ds
import pytest

from airflow_broadway import Batcher, BatchInfo, Message, Rows
from airflow_broadway.core.model.connections import Connection, Connections, to_variable
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import make_ref
from airflow_broadway.runs.spark_batches import Ending, SparkBatches
from airflow_broadway.runs.tasks import BatchTask
from airflow_broadway.sinks import DeltaTable, ParquetFolder, PostgresTable
from airflow_broadway.spark import failed
from airflow_broadway.spark.job import arguments_of
from airflow_broadway.spark.session import INCOMPLETE
from tests.cluster.services import PostgreSQL
from tests.spark_drivers import Drivers
from tests.unit.runs.steps import AS_AIRFLOW, Call, Point, Run, Sums, note
from tests.unit.spark.session import needs_tables

pytestmark = pytest.mark.spark

PARQUET = "airflow_broadway.sinks.parquet"
WRITE = f"{PARQUET}:_SparkClient._write"
CREATE = f"{PARQUET}:_Disk.create"
COMMIT = "airflow_broadway.spark.batch:_Batch._commit"
RECORD = "airflow_broadway.core.formats.record_batch:BatchRecorder.record"


class Folder(Sums):
    """Commits the numbers; those divisible by 5 fail in the batch."""

    name = "Sums"
    batchers = {
        "default": Batcher(
            engine="spark",
            batch_size=10,
            batch_timeout=None,
            schema="n bigint",
            sink=ParquetFolder(path="/replaced"),
        )
    }

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = super().handle_message(processor, message, context)
        return message.put_data({"n": message.data})

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        note(context["calls"], [Call("", 0, 0, False, batch_info.batch_id)])
        return self.rows(messages)

    def rows(self, messages: Any) -> Any:
        """Returns the result of ``handle_batch``."""
        good = messages.where("data.n % 5 != 0").select("data.n")
        return Rows(good, failed=failed(messages.where("data.n % 5 = 0"), reason="five"))


class Delta(Folder):
    batchers = {"default": replace(Folder.batchers["default"], sink=DeltaTable(path="/replaced"))}


class Postgres(Folder):
    batchers = {
        "default": replace(Folder.batchers["default"], sink=PostgresTable(table="public.replaced"))
    }


class Plain(Folder):
    """Has no ``handle_batch``."""

    handle_batch = Pipeline.handle_batch


class AllSucceed(Folder):
    def rows(self, messages: Any) -> Any:
        return messages.select("data.n")


class Lazy(Folder):
    """Its rows cannot be computed."""

    def rows(self, messages: Any) -> Any:
        return messages.selectExpr("if(data.n = 3, raise_error('three'), data.n) AS n")


class LazyFailures(Folder):
    """Its failed messages cannot be computed."""

    def rows(self, messages: Any) -> Any:
        marked = messages.where("if(data.n = 3, raise_error('three'), false)")
        return Rows(messages.select("data.n"), failed=failed(marked))


class Outage(Folder):
    """Fails once an outage has begun."""

    @staticmethod
    def begin(calls: str) -> None:
        """Begins the outage."""
        Path(f"{calls}.outage").touch()

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        if Path(f"{context['calls']}.outage").exists():
            raise OSError("the sink's lookup is away")
        return super().handle_batch(batcher, messages, batch_info, context)


class ReturnsNone(Folder):
    def rows(self, messages: Any) -> Any:
        return None


class ReturnsFailed(Folder):
    def rows(self, messages: Any) -> Any:
        return failed(messages)


class ReturnsOutcomes(Folder):
    def rows(self, messages: Any) -> Any:
        outcomes = messages.selectExpr("message_id", "true AS ok")
        return Rows(messages.select("data.n"), failed=outcomes)


class ReturnsForeign(Folder):
    def rows(self, messages: Any) -> Any:
        return Rows(messages.select("data.n"), failed=failed(["unknown"]))


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    drivers = Drivers(tmp_path_factory.mktemp("drivers"))
    yield drivers
    drivers.close()


def make(folder: Path, run_id: str = "manual__1", **options: Any) -> Run:
    sink = {"sink": {"path": str(folder / "lake")}}
    options.setdefault("pipeline", Folder)
    return Run(folder, run_id, batchers={"default": sink}, **options)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    result = make(tmp_path)
    result.send(range(1, 26))
    return result


def numbers(run: Run, column: str = "n") -> list[Any]:
    """Returns the numbers in the folder as a reader without support for commits sees them."""
    lake = run.folder / "lake"
    table = ds.dataset(lake).to_table() if lake.exists() else None
    values: list[Any] = table[column].to_pylist() if table else []
    return sorted(values)


#: Of 1 to 25: without those that fail in the processor (7, 14, 21) or in the batch (5, 10, …).
GOOD = [item for item in range(1, 26) if item % 7 and item % 5]
DEAD = [item for item in range(1, 26) if item not in GOOD]


class Task:
    """The task that submits a run's batches: one try after another."""

    def __init__(self, run: Run, pulled: Mapping[str, Any], drivers: Drivers) -> None:
        self._run, self._pulled, self._drivers = run, pulled, drivers
        self._tries = 0

    def begin(self, point: Point | None = None, by: int = signal.SIGKILL) -> tuple[Any, int, int]:
        """Runs a try until its driver ends or pauses; returns its batches, pid and exit code."""
        run, self._tries = self._run, self._tries + 1
        task = replace(run.task(-1, self._tries), task_id="batch.default")
        work = BatchTask(run.staged, run.pipeline, task, run.ports, batcher="default")
        plan = work.plan([self._pulled], label=str(self._tries))
        assert plan is not None
        assert work.handle(plan) is None
        batches = SparkBatches(
            run.staged, run.pipeline, [{"plan": plan.path}], run.ports, name="spark"
        )
        if batches.begin() is not Ending.OPEN or not batches.isolation.choose():
            return batches, 0, 0
        info = RunInfo(dag_id=run.staged.dag_id, run_id=run.run_id)
        written = batches.write_work("spark", make_ref(run.pipeline), info)
        arguments = arguments_of(run.staged.spark_uri(), *written)
        return batches, *self._drivers.start(arguments, point, by)

    def run(self, point: Point | None = None) -> dict[str, Any]:
        """Runs a try; its driver dies at ``point``, if any."""
        batches, _, code = self.begin(point)
        assert code == (-signal.SIGKILL if point else 0)
        ending = batches.end()
        assert point or ending is Ending.DONE
        reference: dict[str, Any] = batches.plans.reference()
        return reference


def settle_after_death(run: Run, drivers: Drivers) -> None:
    """Settles a dead run, and handles its redelivered messages in another."""
    options = {**run.pipeline.overrides, "pipeline": type(run.pipeline), "ports": run.ports}
    for name in ("producer", "context"):
        del options[name]
    next_run = Run(run.folder, "manual__2", finished=[run.run_id], create=False, **options)
    received = next_run.process()
    if received["batchers"]:
        Task(next_run, received, drivers).run()
    next_run.ack()


def count_calls(run: Run) -> Counter[str]:
    """Counts the calls of each batch."""
    return Counter(call.batch_id for call in run.calls())


def test_rows_are_committed_and_their_messages_settled(run: Run, drivers: Drivers) -> None:
    counts = Task(run, run.process(), drivers).run()

    report = run.ack()

    assert (counts["batches"], counts["messages"], counts["failed_messages"]) == (3, 22, 5)
    assert numbers(run) == GOOD
    assert (report["totals"]["acked"], report["totals"]["dead_lettered"]) == (len(GOOD), len(DEAD))
    assert run.dead() == DEAD
    assert not list((run.folder / "lake" / "_staged").iterdir())


@pytest.mark.parametrize(
    "point",
    [
        Point(WRITE, "before", 2),
        Point(WRITE, "after", 2),
        Point(CREATE, "before", 2),
        Point(CREATE, "after", 2),
        Point(f"{PARQUET}:_Disk.publish", "after", 2),
        Point(COMMIT, "after", 2),
        Point(RECORD, "before", 2),
        Point(RECORD, "after", 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("retried", [True, False], ids=["retried", "settled by another run"])
def test_no_row_is_lost_or_doubled_where_a_driver_dies(
    run: Run, drivers: Drivers, point: Point, retried: bool
) -> None:
    pulled = run.process()
    task = Task(run, pulled, drivers)
    task.run(point)
    before = len(run.calls())

    if retried:
        task.run()
        run.ack()
    else:
        settle_after_death(run, drivers)

    assert numbers(run) == GOOD
    assert run.dead() == DEAD
    assert run.depth() == (0, 0, 0, len(DEAD))
    # Then only a batch whose commit had not landed was handled again
    landed = point.function != WRITE and str(point) != "before _Disk.create 2"
    assert before == 2
    assert sum(count_calls(run).values()) - 3 == (0 if landed else 1)


@pytest.mark.parametrize("point", [Point(WRITE, "after", 1), Point(CREATE, "before", 1)], ids=str)
def test_a_paused_driver_commits_nothing_once_its_messages_are_released(
    run: Run, drivers: Drivers, point: Point
) -> None:
    # Given a driver that is paused before it commits, and another run that settles its messages
    task = Task(run, run.process(), drivers)
    _, pid, _ = task.begin(point, signal.SIGSTOP)
    assert numbers(run) == []
    settle_after_death(run, drivers)
    assert numbers(run) == GOOD

    # When it resumes
    code = drivers.resume(pid)

    # Then all of its batches are refused
    assert code == INCOMPLETE
    assert numbers(run) == GOOD
    assert run.depth() == (0, 0, 0, len(DEAD))


def test_a_driver_paused_after_its_commit_has_its_rows_once(run: Run, drivers: Drivers) -> None:
    task = Task(run, run.process(), drivers)
    _, pid, _ = task.begin(Point(CREATE, "after", 1), signal.SIGSTOP)
    settle_after_death(run, drivers)

    drivers.resume(pid)

    assert numbers(run) == GOOD
    assert run.dead() == DEAD


def test_a_paused_driver_is_refused_by_the_next_try(run: Run, drivers: Drivers) -> None:
    task = Task(run, run.process(), drivers)
    _, pid, _ = task.begin(Point(CREATE, "before", 1), signal.SIGSTOP)
    task.run()

    # Then it commits nothing, and handles no further batch
    assert drivers.resume(pid) == INCOMPLETE
    assert sum(count_calls(run).values()) == 4

    run.ack()
    assert numbers(run) == GOOD
    assert run.depth() == (0, 0, 0, len(DEAD))


def test_a_paused_driver_commits_nothing_once_its_batch_has_failed(
    tmp_path: Path, drivers: Drivers
) -> None:
    # Given a driver that is paused before it commits, and a next try in which every batch fails
    run = make(tmp_path, pipeline=Outage)
    run.send([1, 2, 3])
    task = Task(run, run.process(), drivers)
    _, pid, _ = task.begin(Point(CREATE, "before", 1), signal.SIGSTOP)
    Outage.begin(run.calls_path)
    task.run()

    drivers.resume(pid)
    run.ack()

    # Then no row is of a message that failed
    assert numbers(run) == []
    assert run.dead() == [1, 2, 3]


def test_without_handle_batch_the_rows_are_the_data(tmp_path: Path, drivers: Drivers) -> None:
    run = make(tmp_path, pipeline=Plain)
    run.send([1, 2, 3])

    Task(run, run.process(), drivers).run()

    assert numbers(run) == [1, 2, 3]
    assert len(set(numbers(run, "message_id"))) == 3
    assert run.ack()["totals"]["acked"] == 3


def test_a_dataframe_alone_commits_all_messages(tmp_path: Path, drivers: Drivers) -> None:
    run = make(tmp_path, pipeline=AllSucceed)
    run.send([4, 5])

    Task(run, run.process(), drivers).run()

    assert numbers(run) == [4, 5]
    assert run.ack()["totals"]["acked"] == 2


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        (Lazy, "three"),
        (LazyFailures, "three"),
        (ReturnsNone, "with a sink it returns the rows to commit, a DataFrame"),
        (ReturnsFailed, "with a sink it returns the rows to commit, a DataFrame"),
        (ReturnsOutcomes, "takes failed"),
        (ReturnsForeign, "not of this batch"),
    ],
)
def test_a_wrong_result_fails_its_batch_and_commits_nothing(
    tmp_path: Path, drivers: Drivers, pipeline: Any, reason: str
) -> None:
    run = make(tmp_path, pipeline=pipeline)
    run.send([1, 3])

    counts = Task(run, run.process(), drivers).run()

    assert (counts["batches"], counts["failed"]) == (1, 1)
    report = run.ack()
    assert numbers(run) == []
    assert run.dead() == [1, 3]
    [reported] = report["reasons"]
    assert reason in reported["reason"]
    assert "\n" not in reported["reason"]


# -- tables ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def writers(
    postgresql: PostgreSQL, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Drivers, Connections]]:
    """Yields drivers that get the database's connection from their environment."""
    address = urlsplit(postgresql.url)
    connection = Connection(
        conn_id="postgres_default",
        host=address.hostname or "",
        port=address.port,
        login="airflow",
        schema="airflow",
    )
    connections: Any = SimpleNamespace(get={"postgres_default": connection}.__getitem__)
    variable = to_variable(connections, ["postgres_default"])
    drivers = Drivers(tmp_path_factory.mktemp("writers"), variable)
    yield drivers, connections
    drivers.close()


class Table(NamedTuple):
    """A run with a table, and the table's reader."""

    run: Run
    drivers: Drivers
    numbers: Callable[[], list[int]]


@pytest.fixture(params=["delta", "postgres"])
def table(request: pytest.FixtureRequest, tmp_path: Path, writers: Any) -> Table:
    import deltalake
    import psycopg
    import pyarrow as pa

    drivers, connections = writers
    pipeline: type[Folder]
    if request.param == "delta":
        path = str(tmp_path / "lake")
        deltalake.DeltaTable.create(path, schema=pa.schema([("n", pa.int64())]))
        pipeline, sink = Delta, {"path": path}

        def numbers() -> list[int]:
            column: list[Any] = deltalake.DeltaTable(path).to_pyarrow_table()["n"].to_pylist()
            return sorted(column)

    else:
        name = f"public.t{uuid.uuid4().hex[:8]}"
        address = connections.get("postgres_default")

        def execute(query: str) -> Any:
            place = {"host": address.host, "port": address.port}
            with psycopg.connect(user="airflow", dbname="airflow", **place) as session:
                cursor = session.execute(query)
                return cursor.fetchall() if cursor.description else None

        execute(f"CREATE TABLE {name} (n bigint)")
        pipeline, sink = Postgres, {"table": name}

        def numbers() -> list[int]:
            return sorted(row[0] for row in execute(f"SELECT n FROM {name}"))

    run = Run(
        tmp_path,
        pipeline=pipeline,
        batchers={"default": {"sink": sink}},
        ports=replace(AS_AIRFLOW, connections=connections),
        numbers=range(1, 26),
    )
    return Table(run, drivers, numbers)


@needs_tables
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("retried", [True, False], ids=["retried", "settled by another run"])
def test_a_table_has_each_row_once_where_a_driver_dies(
    table: Table, moment: str, retried: bool
) -> None:
    run, drivers, numbers = table
    task = Task(run, run.process(), drivers)
    task.run(Point(COMMIT, moment, 2))

    if retried:
        task.run()
        run.ack()
    else:
        settle_after_death(run, drivers)

    assert numbers() == GOOD
    assert run.dead() == DEAD
    assert sum(count_calls(run).values()) - 3 == (1 if moment == "before" else 0)


@needs_tables
def test_a_paused_driver_commits_nothing_to_a_table_once_its_messages_are_released(
    table: Table,
) -> None:
    run, drivers, numbers = table
    task = Task(run, run.process(), drivers)
    _, pid, _ = task.begin(Point(COMMIT, "before", 1), signal.SIGSTOP)
    settle_after_death(run, drivers)

    assert drivers.resume(pid) == INCOMPLETE

    assert numbers() == GOOD
    assert run.depth() == (0, 0, 0, len(DEAD))
