"""Every sink keeps the contract: against races, paused processes and lost answers."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltalake
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_broadway import Batcher
from airflow_broadway.core.errors import BroadwayError, OptionsError
from airflow_broadway.core.formats.commits import commit_rows
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.core.model.sink import CommitInDoubt, CommitRefused, SinkEnv, SinkError
from airflow_broadway.sinks import DeltaTable, IcebergTable, ParquetFolder, delta
from airflow_broadway.testing.sinks import SinkContract, SinkSubject, commit_of, rows_of
from tests import iceberg_catalog, sink_subjects
from tests.cluster.services import PostgreSQL
from tests.iceberg_catalog import RestCatalog
from tests.sink_subjects import SparkClient, SparkSubject
from tests.unit.spark.session import needs_tables


def _address(postgresql: PostgreSQL) -> tuple[str, int]:
    host, port = postgresql.url.rpartition("@")[2].partition("/")[0].split(":")
    return host, int(port)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestCatalog]:
    if not iceberg_catalog.JARS:
        pytest.skip("no jars of a REST catalog: scripts/setup.sh --tables, which needs mvn")
    catalog = RestCatalog(tmp_path_factory.mktemp("iceberg") / "catalog")
    yield catalog
    catalog.stop()


ICEBERG = ["iceberg", "iceberg by REST"]
KINDS = ["delta", *ICEBERG, "postgres"]
ON_SPARK = ["delta", "postgres"]


def _made(kind: str, request: pytest.FixtureRequest, *, spark: bool) -> SinkSubject:
    folder = request.getfixturevalue("tmp_path") / "table"
    if kind == "delta":
        made = sink_subjects.delta(folder)
    elif kind == "iceberg by REST":
        url = request.getfixturevalue("catalog").url
        made = sink_subjects.iceberg({"type": "rest", "uri": url})
    else:
        address = _address(request.getfixturevalue("postgresql"))
        if kind == "postgres":
            made = sink_subjects.postgres(*address)
        else:
            made = sink_subjects.iceberg(sink_subjects.iceberg_database(folder, *address))
    # A driver on Spark, next to a settlement in Python
    return SparkSubject(made.sink, made.read, made.env) if spark else made


@pytest.fixture(params=KINDS)
def python_subject(request: pytest.FixtureRequest) -> SinkSubject:
    return _made(request.param, request, spark=False)


@pytest.fixture(params=ON_SPARK)
def spark_subject(request: pytest.FixtureRequest) -> SinkSubject:
    return _made(request.param, request, spark=True)


on_spark = [pytest.mark.spark, needs_tables]


@pytest.fixture(
    params=KINDS + [pytest.param(f"{kind} from Spark", marks=on_spark) for kind in ON_SPARK]
)
def subject(request: pytest.FixtureRequest) -> SinkSubject:
    kind = request.param.removesuffix(" from Spark")
    return _made(kind, request, spark=kind != request.param)


class TestSinks(SinkContract):
    @pytest.fixture
    def subject(self, python_subject: SinkSubject) -> SinkSubject:
        return python_subject


class TestParquetFolder(SinkContract):
    races = 400  # with 20, a walk rarely meets a folder that is being removed

    @pytest.fixture
    def subject(self, tmp_path: Path) -> SinkSubject:
        def read() -> list[str]:
            files = tmp_path.glob("table/*.parquet")  # those that Spark and pyarrow read
            return [str(row) for file in files for row in pq.read_table(file)["message_id"]]

        return SinkSubject(ParquetFolder(path=str(tmp_path / "table")), read)

    def test_files_that_cannot_be_listed_are_not_left_out_of_a_commit(self, subject, monkeypatch):
        real = os.scandir

        def scandir(path: Any) -> Any:
            if "/_staged/" in str(path):
                raise OSError(errno.EIO, "Input/output error", path)
            return real(path)

        with closing(subject.open()) as client:
            monkeypatch.setattr(os, "scandir", scandir)
            with pytest.raises(SinkError, match="Input/output"):
                client.commit(rows_of("a"), commit_of("b1.0"))
            monkeypatch.undo()
            assert client.landed(["b1.0"]) == {}
            client.commit(rows_of("a"), commit_of("b1.0"))
        assert list(subject.read()) == ["a"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestThousandRaces(TestSinks):
    races = 1_000

    @pytest.fixture(params=["delta", "postgres"])
    def subject(self, request: pytest.FixtureRequest) -> SinkSubject:
        return _made(request.param, request, spark=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestThousandRacesOfIceberg(TestSinks):
    """In ten tables each: a commit takes the longer the more snapshots there are."""

    races = 100

    @pytest.fixture(params=[f"{kind} {number}" for kind in ICEBERG for number in range(10)])
    def subject(self, request: pytest.FixtureRequest) -> SinkSubject:
        return _made(request.param.rpartition(" ")[0], request, spark=False)


@pytest.mark.spark
@needs_tables
class TestSparkSinks(SinkContract):
    races = 10
    many = 5

    @pytest.fixture
    def subject(self, spark_subject: SinkSubject) -> SinkSubject:
        return spark_subject


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestTwoHundredRacesOfSpark(TestSparkSinks):
    races = 200


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestSparkAlone(TestSparkSinks):
    races = 50

    @pytest.fixture
    def subject(self, spark_subject: SinkSubject) -> SinkSubject:
        return dataclasses.replace(spark_subject, mixed=False)  # type: ignore[call-arg]


def _pause(subject: SinkSubject, rounds: int) -> None:
    """A process is stopped at some moment of its commit, which is ruled out before it goes on."""
    kind = next(name for name, cls in sink_subjects.SINKS.items() if type(subject.sink) is cls)
    conn_id = subject.sink.conn_id  # type: ignore[attr-defined]
    connection = {}
    if conn_id is not None:
        connection = dataclasses.asdict(subject.env.connections.get(conn_id))
        del connection["conn_id"]
    options = {
        field.name: getattr(subject.sink, field.name)
        for field in dataclasses.fields(subject.sink)  # type: ignore[arg-type]
    }
    spark = isinstance(subject, SparkSubject)
    given = json.dumps({"options": options, "connection": connection, "spark": spark})
    command = [sys.executable, "-m", "tests.sink_subjects", kind, given]
    with (
        closing(subject.sink.open(subject.env)) as settlement,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,  # with its JVM
        ) as driver,
    ):
        assert driver.stdin is not None
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        took, results = 0.05, Counter[str]()
        landed: dict[str, int] = {}
        for name in ("w1.0", "w2.0", "w3.0"):  # how long a commit takes
            driver.stdin.write(f"{name}\n")
            assert driver.stdout.readline() == "begun\n"
            begun = time.monotonic()
            assert driver.stdout.readline() == "landed\n"
            took, landed[name] = time.monotonic() - begun, 1
        for number in range(rounds):
            name = f"p{number}.0"
            driver.stdin.write(f"{name}\n")
            assert driver.stdout.readline() == "begun\n"
            time.sleep(random.uniform(0, took))
            os.killpg(driver.pid, signal.SIGSTOP)
            reported = settlement.rule_out([name])
            os.killpg(driver.pid, signal.SIGCONT)
            result = driver.stdout.readline().strip()
            if "psycopg.OperationalError" in result:  # its session was ended while it was stopped
                result = "refused"
            assert result == ("landed" if reported else "refused"), result
            results[result] += 1
            landed |= reported
        driver.stdin.close()
    print(dict(results))
    assert Counter(subject.read()) == dict.fromkeys(landed, 1)


def test_a_paused_process_is_refused(subject: SinkSubject) -> None:
    _pause(subject, 3 if isinstance(subject, SparkSubject) else 10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_process_paused_at_any_moment_is_refused(subject: SinkSubject) -> None:
    _pause(subject, 50 if isinstance(subject, SparkSubject) else 300)


def _break_commit(client: Any, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Makes the client's commit fail before it is sent, or after it has landed."""
    driver = client.client if isinstance(client, SparkClient) else None
    client = driver or client
    if hasattr(client, "_psycopg"):
        error: Exception = client._psycopg.OperationalError("server closed the connection")
        place, name = client, "_commit" if driver else "_run"
    elif driver:
        error, place, name = OSError("No space left on device"), client, "_write"
    elif hasattr(client, "_catalog"):
        error = ConnectionError("Connection reset by peer")
        place, name = client._catalog, "commit_table"
    else:
        error, place, name = (
            OSError("No space left on device"),
            client._deltalake,
            "write_deltalake",
        )
    call = getattr(place, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(place, name, call)
        if when == "after":
            call(*args, **kwargs)
        raise error

    monkeypatch.setattr(place, name, broken)


def test_a_commit_that_lands_despite_an_error_is_a_success(
    subject: SinkSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(subject.open()) as client:
        _break_commit(client, monkeypatch, "after")
        commit_rows(client, rows_of("a"), commit_of("b1.0"))
        assert client.landed(["b1.0"]) == {"b1.0": 1}
    assert list(subject.read()) == ["a"]


def test_a_commit_that_failed_can_never_land(
    subject: SinkSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(subject.open()) as client:
        _break_commit(client, monkeypatch, "before")
        with pytest.raises(SinkError, match="nothing was written, and it is ruled out"):
            commit_rows(client, rows_of("a"), commit_of("b1.0"))
        with pytest.raises(CommitRefused):
            client.commit(rows_of("a"), commit_of("b1.0"))
    assert list(subject.read()) == []


def test_a_commit_stays_open_if_its_writer_is_lost(
    subject: SinkSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(error: Exception) -> None:
        raise BroadwayError("Spark is lost") from error

    with closing(subject.open()) as client:
        _break_commit(client, monkeypatch, "before")
        with pytest.raises(BroadwayError, match="Spark is lost"):
            commit_rows(client, rows_of("a"), commit_of("b1.0"), check=lost)
        monkeypatch.undo()
        commit_rows(client, rows_of("a"), commit_of("b1.0"))
    assert list(subject.read()) == ["a"]


def test_a_commit_is_in_doubt_while_the_table_cannot_be_reached(
    subject: SinkSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(_: Any) -> Any:
        raise SinkError("it is away")

    monkeypatch.setattr("airflow_broadway.core.formats.commits._PAUSES", (0.0, 0.0))
    with closing(subject.open()) as client:
        _break_commit(client, monkeypatch, "after")
        monkeypatch.setattr(client, "rule_out", unreachable)
        with pytest.raises(CommitInDoubt, match="may have landed"):
            commit_rows(client, rows_of("a"), commit_of("b1.0"))
        monkeypatch.undo()
        assert client.rule_out(["b1.0"]) == {"b1.0": 1}


def _others() -> dict[str, Any]:
    import pyarrow as pa

    return {
        "more columns": pa.table({"message_id": ["a"], "n": [1], "more": [1]}),
        "another type": pa.table({"message_id": ["a"], "n": ["x"]}),
    }


@pytest.mark.parametrize("name", _others())
def test_rows_that_do_not_fit_are_one_error(subject: SinkSubject, name: str) -> None:
    with closing(subject.open()) as client:
        with pytest.raises(SinkError, match="othing was written") as caught:
            commit_rows(client, _others()[name], commit_of("b1.0"))
        assert "\n" not in str(caught.value)
        client.commit(rows_of("a"), commit_of("b1.1"))
    assert list(subject.read()) == ["a"]


def test_a_missing_table_is_one_error(subject: SinkSubject, tmp_path: Path) -> None:
    missing = "path" if isinstance(subject.sink, DeltaTable) else "table"
    value = str(tmp_path / "none") if missing == "path" else "public.no_such_table"
    sink = dataclasses.replace(subject.sink, **{missing: value})  # type: ignore[type-var]

    with pytest.raises(SinkError, match=r"none|no_such_table") as caught:
        dataclasses.replace(subject, sink=sink).open()
    assert not (tmp_path / "none").exists()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spark", [False, pytest.param(True, marks=on_spark)])
def test_a_delta_table_that_forgets_commits_is_refused(tmp_path: Path, spark: bool) -> None:
    import deltalake

    forgets = {"delta.setTransactionRetentionDuration": "interval 2 days"}
    folder = str(tmp_path / "table")
    deltalake.DeltaTable.create(folder, schema=rows_of("a").schema, configuration=forgets)

    kind = SparkSubject if spark else SinkSubject
    with pytest.raises(SinkError, match="forgets commits"):
        kind(DeltaTable(path=folder), list).open()


def test_delta_forgets_commits_older_than_its_retention_and_refuses_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a table with a commit and a tombstone of 41 days ago, and of 39 days ago
    folder, day = str(tmp_path / "table"), 86_400
    kept = {"delta.setTransactionRetentionDuration": "interval 40 days"}
    deltalake.DeltaTable.create(folder, schema=rows_of("a").schema, configuration=kept)
    client: Any = DeltaTable(path=folder).open(SinkEnv())
    for age in (41, 39):
        with monkeypatch.context() as patched:
            now = time.time() - age * day
            patched.setattr(delta, "time", SimpleNamespace(time=lambda now=now: now))
            client.commit(rows_of("a"), commit_of(f"b{age}.0"))
            tombstone = client._properties(2, {f"t{age}.0": 0})
            table = client.load()
            table.create_write_transaction(
                [], "append", table.schema(), commit_properties=tombstone
            )

    assert {*client.landed(["b41.0", "b39.0"])} == {"b39.0"}
    for name in ("b39.0", "t39.0"):
        with pytest.raises(CommitRefused):
            client.commit(rows_of("b"), commit_of(name, 2))
    for name in ("b41.0", "t41.0"):
        client.commit(rows_of("b"), commit_of(name, 2))
    table = deltalake.DeltaTable(folder)
    table.create_checkpoint()
    log = pq.read_table(next((tmp_path / "table/_delta_log").glob("*.checkpoint.parquet")))
    assert {t["appId"] for t in log["txn"].to_pylist() if t} >= {"b39.0", "t39.0"}
    assert all(t["lastUpdated"] for t in log["txn"].to_pylist() if t)


def test_a_removed_history_of_delta_is_one_error(tmp_path: Path) -> None:
    subject = sink_subjects.delta(tmp_path / "table")
    with closing(subject.open()) as client:
        client.commit(rows_of("a"), commit_of("b1.0"))
        client.load().create_checkpoint()  # type: ignore[attr-defined]
        for log in (tmp_path / "table" / "_delta_log").glob("*.json"):
            log.unlink()
        with pytest.raises(SinkError, match="history has been removed"):
            client.commit(rows_of("a"), commit_of("b1.0", 2))
    assert list(subject.read()) == ["a"]


def test_another_unique_key_of_a_table_is_no_refusal(postgresql: PostgreSQL) -> None:
    subject = sink_subjects.postgres(*_address(postgresql))
    with closing(subject.open()) as client:
        with client._session() as session:  # type: ignore[attr-defined]
            session.execute(f"CREATE UNIQUE INDEX ON {subject.sink.table} (message_id)")  # type: ignore[attr-defined]
        client.commit(rows_of("a"), commit_of("b1.0"))
        with pytest.raises(SinkError, match="duplicate key") as caught:
            client.commit(rows_of("a"), commit_of("b2.0"))
        assert not isinstance(caught.value, CommitRefused)
        assert client.landed(["b2.0"]) == {}


@pytest.mark.parametrize("action", ["create the ledger", "rule out"])
def test_a_process_that_pauses_holds_no_lock(
    postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    made = sink_subjects.postgres(*_address(postgresql))
    ledger = f"public.l{uuid.uuid4().hex[:8]}"
    subject = dataclasses.replace(made, sink=dataclasses.replace(made.sink, ledger=ledger))  # type: ignore[type-var]
    if action == "create the ledger":
        first = "SELECT pg_advisory"
        calls: list[Callable[[], Any]] = [subject.open, subject.open]
    else:
        clients = [subject.open() for _ in range(2)]
        first, calls = "INSERT", [partial(client.rule_out, ["one"]) for client in clients]
    execute, paused, resumed = psycopg.Connection.execute, threading.Event(), threading.Event()

    def pause_after(session: Any, query: Any, *args: Any) -> Any:
        result = execute(session, query, *args)
        text = query if isinstance(query, str) else query.as_string()
        if text.startswith(first) and threading.current_thread() is thread:
            paused.set()
            resumed.wait(60)
        return result

    monkeypatch.setattr(psycopg.Connection, "execute", pause_after)
    thread = threading.Thread(target=calls[0])
    thread.start()
    other = ThreadPoolExecutor(1)
    try:
        assert paused.wait(30)
        other.submit(calls[1]).result(10)
    finally:
        resumed.set()
        thread.join()
        other.shutdown()


def test_a_connection_whose_commit_fails_is_closed(
    postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = sink_subjects.postgres(*_address(postgresql))
    client = subject.open()
    sessions = []

    def fail(session: Any) -> None:
        sessions.append(session)
        raise psycopg.OperationalError("timed out")

    monkeypatch.setattr(psycopg.Connection, "commit", fail)

    with pytest.raises(SinkError, match="timed out"):
        client.landed(["one"])
    assert [session.closed for session in sessions] == [True]


@pytest.mark.parametrize("kind", ["postgres", "iceberg"])
def test_a_database_that_ends_is_in_no_doubt(
    postgresql: PostgreSQL, request: pytest.FixtureRequest, kind: str
) -> None:
    subject = _made(kind, request, spark=False)
    with closing(subject.open()) as client:
        postgresql.restart()
        client.commit(rows_of("a"), commit_of("b1.0"))
        postgresql.stop()
        try:
            with pytest.raises(SinkError, match=r"127\.0\.0\.1") as caught:
                client.landed(["b1.0"])
            assert "\n" not in str(caught.value)
        finally:
            postgresql.start()
        assert client.rule_out(["b1.0"]) == {"b1.0": 1}


# -- Apache Iceberg --------------------------------------------------------------------------------


@pytest.fixture
def lake(postgresql: PostgreSQL, tmp_path: Path) -> Iterator[tuple[SinkSubject, Any]]:
    """A subject, and its table as pyiceberg opens it."""
    from pyiceberg.catalog import load_catalog

    properties = sink_subjects.iceberg_database(tmp_path, *_address(postgresql))
    subject = sink_subjects.iceberg(properties)
    with closing(load_catalog("lake", **properties)) as catalog:
        yield subject, catalog.load_table(subject.sink.table)  # type: ignore[attr-defined]


@pytest.mark.parametrize("set_by", ["the default", "the table", "its branch"])
def test_an_iceberg_table_that_forgets_commits_is_refused(
    lake: tuple[SinkSubject, Any], set_by: str
) -> None:
    subject, table = lake
    name = "history.expire.max-snapshot-age-ms"
    with table.transaction() as transaction:
        if set_by == "the default":
            transaction.remove_properties(name)
        elif set_by == "the table":
            transaction.set_properties({name: "86400000"})
    if set_by == "its branch":
        table.append(rows_of("a"))
        latest = table.current_snapshot().snapshot_id
        table.manage_snapshots().create_branch(latest, "main", max_snapshot_age_ms=1000).commit()

    with pytest.raises(SinkError, match=r"forgets commits after [\d.e-]+ days .*2764800000"):
        subject.open()


def test_an_iceberg_table_that_pyiceberg_cannot_write_is_refused(catalog: RestCatalog) -> None:
    subject = sink_subjects.iceberg({"type": "rest", "uri": catalog.url}, {"format-version": "3"})

    with pytest.raises(SinkError, match="has format version 3"):
        subject.open()


@pytest.mark.parametrize("how", ["expired", "rolled back", "made anew"])
def test_an_iceberg_table_that_has_lost_snapshots_is_in_doubt(
    lake: tuple[SinkSubject, Any], how: str
) -> None:
    subject, table = lake
    with closing(subject.open()) as early:
        early.commit(rows_of("a"), commit_of("b1.0"))
    with closing(subject.open()) as client:
        with closing(subject.open()) as other:
            other.rule_out(["b2.0"])
            other.rule_out(["b3.0"])
        table.refresh()
        ids = [snapshot.snapshot_id for snapshot in table.metadata.snapshots]
        if how == "expired":
            table.maintenance.expire_snapshots().by_ids(ids[:2]).commit()
        elif how == "rolled back":
            early.commit(rows_of("b"), commit_of("b4.0"))
            client = subject.open()
            table.refresh().manage_snapshots().rollback_to_snapshot(ids[0]).commit()
        else:
            table.catalog.drop_table(table.name())
            table.catalog.create_table(table.name(), rows_of("a").schema)
        for call in (
            lambda: client.commit(rows_of("c"), commit_of("b2.0")),
            lambda: client.landed(["b2.0"]),
            lambda: client.rule_out(["b2.0"]),
        ):
            expected = SinkError if how == "made anew" else CommitInDoubt
            with pytest.raises(expected, match=r"lost snapshots|UUID does not match"):
                call()
    assert "c" not in subject.read()


def test_iceberg_takes_new_and_required_columns_and_partitions(
    lake: tuple[SinkSubject, Any],
) -> None:
    import pyarrow as pa
    from pyiceberg.transforms import BucketTransform

    subject, table = lake
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.update_column("message_id", required=True)
    with table.update_spec() as update:
        update.add_field("message_id", BucketTransform(4))
    rows = pa.table({"message_id": ["a"], "n": [1], "more": pa.array([{"of": 1}])})
    merging = dataclasses.replace(subject.sink, schema_mode="merge")  # type: ignore[type-var]
    with closing(dataclasses.replace(subject, sink=merging).open()) as client:
        client.commit(rows, commit_of("b1.0"))
        client.commit(rows_of("b"), commit_of("b2.0"))

    found = table.refresh().scan().to_arrow().sort_by("message_id").to_pylist()
    assert [(row["message_id"], row["more"]) for row in found] == [("a", {"of": 1}), ("b", None)]


def test_iceberg_takes_the_catalog_of_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}

    def load_catalog(name: str, **properties: str) -> Any:
        given.update(properties, name=name)
        raise OSError("away: http://user:s3cr3t@lake.test")

    monkeypatch.setattr("pyiceberg.catalog.load_catalog", load_catalog)
    connection = Connection(
        conn_id="lake",
        host="http://lake.test",
        login="id",
        password="s3cr3t",
        extra={"warehouse": "orders", "s3.path-style-access": True},
    )
    env = SinkEnv(connections=SimpleNamespace(get={"lake": connection}.__getitem__))
    with pytest.raises(SinkError, match=r"iceberg://prod/a/b cannot be opened.*away") as caught:
        IcebergTable(table="a.b", catalog="prod", conn_id="lake").open(env)

    assert "s3cr3t" not in str(caught.value)
    assert (
        given.items()
        >= {
            "name": "prod",
            "uri": "http://lake.test",
            "credential": "id:s3cr3t",
            "warehouse": "orders",
            "s3.path-style-access": "True",
        }.items()
    )


def test_iceberg_from_spark_is_refused_at_parse() -> None:
    with pytest.raises(OptionsError, match=r"runtimes for Spark 3\.5, 4\.0 and 4\.1.*'python'"):
        Batcher(schema="n bigint", sink=IcebergTable(table="lake.orders"))
    assert Batcher(engine="python", sink=IcebergTable(table="lake.orders")).sink


# -- from Spark ------------------------------------------------------------------------------------


@pytest.mark.spark
@needs_tables
def test_a_tombstone_of_spark_refuses_a_commit_of_python(spark_subject: SparkSubject) -> None:
    with closing(spark_subject.open()) as spark, closing(spark_subject.open()) as python:
        assert spark.rule_out(["b1.0"]) == {}
        with pytest.raises(CommitRefused):
            python.commit(rows_of("a"), commit_of("b1.0"))
        assert python.landed(["b1.0"]) == python.rule_out(["b1.0"]) == {}
    assert list(spark_subject.read()) == []


@pytest.mark.spark
@needs_tables
@pytest.mark.parametrize("rival", ["python", "spark"])
def test_delta_refuses_a_write_that_began_before_the_tombstone(tmp_path: Path, rival: str) -> None:
    made = sink_subjects.delta(tmp_path / "table")
    subject = SparkSubject(made.sink, made.read, mixed=rival == "python")
    begun, ended = str(tmp_path / "begun"), str(tmp_path / "ended")

    def wait(batches: Any) -> Any:
        open(begun, "w").close()
        while not os.path.exists(ended):
            time.sleep(0.05)
        yield from batches

    # Given a driver whose executors write files
    results: list[Any] = []
    with closing(subject.open()) as driver, closing(subject.open()) as settlement:
        session = driver.session  # type: ignore[attr-defined]
        rows = session.createDataFrame(rows_of("a")).coalesce(1)
        waiting = rows.mapInArrow(wait, rows.schema)
        client = driver.client  # type: ignore[attr-defined]

        def commit() -> None:
            try:
                client.commit(waiting, commit_of("b1.0"))
            except Exception as error:
                results.append(error)

        thread = threading.Thread(target=commit)
        thread.start()
        while thread.is_alive() and not os.path.exists(begun):
            time.sleep(0.05)

        # When its commit is ruled out before they end
        assert settlement.rule_out(["b1.0"]) == {}
        open(ended, "w").close()
        thread.join()

    # Then it is refused, and its files are no part of the table
    assert [type(item) for item in results] == [CommitRefused], results
    assert list((tmp_path / "table").glob("*.parquet"))
    assert list(subject.read()) == []


# -- PostgreSQL from Spark -------------------------------------------------------------------------


@pytest.fixture
def staged(postgresql: PostgreSQL) -> SparkSubject:
    made = sink_subjects.postgres(*_address(postgresql))
    return SparkSubject(made.sink, made.read, made.env)


def _staging_tables(client: Any) -> list[str]:
    with client._session() as session:
        found = session.execute("SELECT relname FROM pg_class WHERE relname LIKE 'broadway_stag%'")
        return [row[0] for row in found.fetchall()]


class _ManyTypes:
    columns = (
        "t text, i integer, d double precision, n numeric(9, 2), b boolean, day date,"
        ' at timestamptz, raw bytea, nested jsonb, list jsonb, "Upper case" bigint'
    )

    @staticmethod
    def rows() -> Any:
        import pyarrow as pa

        at = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
        values: dict[str, tuple[pa.DataType, Any]] = {
            "t": (pa.string(), 'quote " and \\ and ü\n'),
            "i": (pa.int32(), 7),
            "d": (pa.float64(), 0.5),
            "n": (pa.decimal128(9, 2), Decimal("12.34")),
            "b": (pa.bool_(), True),
            "day": (pa.date32(), at.date()),
            "at": (pa.timestamp("us", "UTC"), at),
            "raw": (pa.binary(), b"\x00\xff"),
            "nested": (pa.struct([("a", pa.int64())]), {"a": 1}),
            "list": (pa.list_(pa.int64()), [1, 2]),
            "Upper case": (pa.int64(), 1),
        }
        columns = {name: pa.array([value, None], kind) for name, (kind, value) in values.items()}
        return pa.table(columns)


@pytest.mark.spark
@needs_tables
def test_spark_writes_what_python_writes(postgresql: PostgreSQL) -> None:
    subjects = [sink_subjects.postgres(*_address(postgresql)) for _ in range(2)]
    contents = []
    for spark, subject in enumerate(subjects):
        opened = SparkSubject(subject.sink, subject.read, subject.env) if spark else subject
        with closing(subject.sink.open(subject.env)) as python:
            table = subject.sink.table  # type: ignore[attr-defined]
            with python._session() as session:  # type: ignore[attr-defined]
                session.execute(f"DROP TABLE {table}")
                session.execute(f"CREATE TABLE {table} ({_ManyTypes.columns})")
            with closing(opened.open()) as client:
                client.commit(_ManyTypes.rows(), commit_of("b1.0"))
            with python._session() as session:  # type: ignore[attr-defined]
                contents.append(session.execute(f"SELECT * FROM {table} ORDER BY i").fetchall())

    assert contents[0] == contents[1]
    assert len(contents[0]) == 2


@pytest.mark.spark
@needs_tables
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("INSERT INTO {0} SELECT * FROM {0} WHERE _broadway_row >= 0", "a task of Spark wrote"),
        ("TRUNCATE {0}", "the server lost them"),
    ],
)
def test_staged_rows_that_are_not_whole_are_not_committed(
    staged: SparkSubject, monkeypatch: pytest.MonkeyPatch, harm: str, reason: str
) -> None:
    client = staged.open()
    inner = client.client  # type: ignore[attr-defined]
    stage = inner._stage

    def harmed(rows: Any, name: str) -> None:
        stage(rows, name)
        with inner._session() as session:
            session.execute(harm.format(f"public.{name}"))

    monkeypatch.setattr(inner, "_stage", harmed)
    with pytest.raises(SinkError, match=reason):
        client.commit(rows_of("a"), commit_of("b1.0"))
    monkeypatch.undo()

    assert list(staged.read()) == []
    client.commit(rows_of("a"), commit_of("b1.0"))
    assert list(staged.read()) == ["a"]
    assert _staging_tables(inner) == []


@pytest.mark.spark
@needs_tables
def test_what_a_dead_driver_staged_is_removed_with_its_commit(
    staged: SparkSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two drivers that died when their rows were staged
    client = staged.open()
    inner = client.client  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(inner, "_commit", lambda *_: None)
        patch.setattr(inner, "_drop_staging", lambda *_: None)
        for name in ("b1.0", "b2.0"):
            client.commit(rows_of("a"), commit_of(name))
    assert len(_staging_tables(inner)) == 2

    # When one of their commits is ruled out, and a second attempt at the other one lands
    with closing(staged.sink.open(staged.env)) as settlement:
        settlement.rule_out(["b1.0"])
        assert len(_staging_tables(inner)) == 1
        client.commit(rows_of("b"), commit_of("b2.0", 2))
        settlement.rule_out(["b3.0"])

    # Then nothing is left
    assert _staging_tables(inner) == []
    assert list(staged.read()) == ["b"]


@pytest.mark.spark
@needs_tables
def test_no_plan_of_spark_shows_the_password(staged: SparkSubject) -> None:
    known = staged.env.connections.get("postgres_default")
    secret = dataclasses.replace(known, password="s3cr3t-of-the-test")
    env = SinkEnv(connections=SimpleNamespace(get=lambda _: secret))
    client = dataclasses.replace(staged, env=env).open()

    client.commit(rows_of("a"), commit_of("b1.0"))

    session = client.session  # type: ignore[attr-defined]
    session.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    shown = session._jsparkSession.sharedState().statusStore().executionsList()
    plans = [shown.apply(n) for n in range(shown.size())]
    texts = [f"{plan.physicalPlanDescription()} {plan.description()}" for plan in plans]
    assert any("SaveIntoDataSourceCommand" in text for text in texts)
    assert not any("s3cr3t" in text for text in texts)


# -- deletions -------------------------------------------------------------------------------------

DAY = Interval(datetime(2013, 1, 2, tzinfo=UTC), datetime(2013, 1, 3, tzinfo=UTC))
#: The first instant of the day, the last one, and those next to it.
TIMES = [
    datetime(2013, 1, 1, 23, 59, 59, tzinfo=UTC),
    datetime(2013, 1, 2, tzinfo=UTC),
    datetime(2013, 1, 2, 23, 59, 59, tzinfo=UTC),
    datetime(2013, 1, 3, tzinfo=UTC),
]


def _times(kind: str) -> list[datetime]:
    return [at if kind == "timestamptz" else at.replace(tzinfo=None) for at in TIMES]


_KINDS: dict[str, Any] = {
    "timestamptz": pa.timestamp("us", tz="UTC"),
    "timestamp": pa.timestamp("us"),
    "date": pa.date32(),
}


def _timed_delta(folder: Path, kind: str) -> SinkSubject:
    times: Any = pa.array(_times(kind)).cast(_KINDS[kind], safe=False)
    rows = pa.table({"message_id": list("abcd"), "at": times})
    deltalake.write_deltalake(folder, rows)

    def read() -> list[str]:
        return [str(v) for v in deltalake.DeltaTable(folder).to_pyarrow_table()["message_id"]]

    return SinkSubject(DeltaTable(path=str(folder), time_column="at"), read)


def _timed_iceberg(properties: dict[str, str], kind: str) -> SinkSubject:
    made = sink_subjects.iceberg(properties)
    sink: Any = made.sink
    times: Any = pa.array(_times(kind)).cast(_KINDS[kind], safe=False)
    rows = pa.table({"message_id": list("abcd"), "at": times})
    merging = dataclasses.replace(sink, schema_mode="merge")
    with closing(merging.open(made.env)) as client:
        client.commit(rows, commit_of("b1.0"))
    return SinkSubject(dataclasses.replace(sink, time_column="at"), made.read, made.env)


def _timed_postgres(postgresql: PostgreSQL, kind: str) -> SinkSubject:
    made = sink_subjects.postgres(*_address(postgresql))
    sink: Any = made.sink
    host, port = _address(postgresql)
    with psycopg.connect(host=host, port=port, user="airflow", dbname="airflow") as session:
        session.execute("SET timezone = 'America/New_York'")
        session.execute(f"ALTER TABLE {sink.table} ADD COLUMN at {kind}")
        for name, at in zip("abcd", _times(kind), strict=True):
            session.execute(f"INSERT INTO {sink.table} VALUES (%s, 1, %s)", [name, at])
        session.execute("ALTER DATABASE airflow SET timezone = 'America/New_York'")
    return SinkSubject(dataclasses.replace(sink, time_column="at"), made.read, made.env)


@pytest.mark.parametrize("kind", ["timestamptz", "timestamp"])
@pytest.mark.parametrize("table", ["delta", "iceberg", "postgres"])
def test_a_deletion_removes_the_rows_of_its_interval_once(
    request: pytest.FixtureRequest, tmp_path: Path, table: str, kind: str
) -> None:
    if table == "delta":
        subject = _timed_delta(tmp_path / "timed", kind)
    elif table == "iceberg":
        address = _address(request.getfixturevalue("postgresql"))
        subject = _timed_iceberg(sink_subjects.iceberg_database(tmp_path, *address), kind)
    else:
        subject = _timed_postgres(request.getfixturevalue("postgresql"), kind)
    with closing(subject.open()) as client:
        client.rule_out(["backfill.late"])
        with pytest.raises(CommitRefused):
            client.delete(DAY, commit_of("backfill.late"))
        assert sorted(subject.read()) == ["a", "b", "c", "d"]

        client.delete(DAY, commit_of("backfill.one"))

        assert sorted(subject.read()) == ["a", "d"]
        assert client.landed(["backfill.one", "backfill.late"]) == {"backfill.one": 1}
        client.delete(DAY, commit_of("backfill.two"))  # there is nothing left
        assert client.landed(["backfill.two"]) == {"backfill.two": 1}
        assert client.rule_out(["backfill.two"]) == {"backfill.two": 1}


@pytest.mark.parametrize(("column", "error"), [("at", "is date"), ("when", "is missing")])
@pytest.mark.parametrize("table", ["delta", "iceberg", "postgres"])
def test_a_time_column_without_timestamps_is_refused(
    request: pytest.FixtureRequest, tmp_path: Path, table: str, column: str, error: str
) -> None:
    if table == "delta":
        subject = _timed_delta(tmp_path / "timed", "date")
    elif table == "iceberg":
        address = _address(request.getfixturevalue("postgresql"))
        subject = _timed_iceberg(sink_subjects.iceberg_database(tmp_path, *address), "date")
    else:
        subject = _timed_postgres(request.getfixturevalue("postgresql"), "date")
    sink: Any = subject.sink
    with pytest.raises(SinkError, match=f"time_column '{column}' of .* {error}"):
        dataclasses.replace(sink, time_column=column).open(subject.env)


def test_a_deletion_that_began_before_its_tombstone_is_refused_by_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a process that is paused after it has read the table
    subject = _timed_delta(tmp_path / "timed", "timestamptz")
    recorded = delta._Client._recorded

    def paused(client: Any, table: Any, ids: Any) -> Any:
        found = recorded(client, table, ids)
        monkeypatch.undo()
        with closing(subject.open()) as other:
            other.rule_out(list(ids))
        return found

    with closing(subject.open()) as client:
        monkeypatch.setattr(delta._Client, "_recorded", paused)
        with pytest.raises(CommitRefused):
            client.delete(DAY, commit_of("backfill.one"))
    assert sorted(subject.read()) == ["a", "b", "c", "d"]
