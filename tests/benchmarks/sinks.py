"""A sink's commit, compared with a plain write of the same rows by the same client.

``sink.<table>`` commits from Python, ``sink.spark.<table>`` ten times as many rows from Spark.
``.plain`` appends to another table of the same type.  A table grows by one commit per try.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_broadway.core.model.sink import SinkClient
from airflow_broadway.sinks import ParquetFolder
from airflow_broadway.testing.sinks import SinkSubject, commit_of
from tests import sink_subjects
from tests.benchmarks.figures import Figures, median, temporary_folder
from tests.cluster.services import PostgreSQL
from tests.unit.spark.session import TABLES, spark_session

#: Rows per commit.
ROWS = 200_000


def bench_sinks(rows: int = ROWS, tries: int = 9) -> Figures:
    """Measures all figures: seconds per commit."""
    table = pa.table(
        {"message_id": [f"{number:032x}" for number in range(rows)], "n": list(range(rows))}
    )
    figures: Figures = []
    with temporary_folder() as folder, _postgresql(folder) as address:
        lake = sink_subjects.iceberg_database(folder / "lake", *address)
        parquet = ParquetFolder(path=str(folder / "parquet"))
        for name, subject, write in (
            ("parquet", SinkSubject(parquet, list), partial(_write_parquet, folder / "plain")),
            ("delta", sink_subjects.delta(folder / "delta"), _delta(folder / "plain-delta")),
            ("iceberg", sink_subjects.iceberg(lake), _iceberg(lake)),
            ("postgres", sink_subjects.postgres(*address), _postgres(address)),
        ):
            with closing(subject.open()) as client:
                figures += _compare(f"sink.{name}", client, write, table, tries)
        if TABLES:
            figures += _on_spark(folder, address, 10 * rows, max(1, tries // 2))
    return figures


def _compare(
    name: str, client: SinkClient, write: Callable[[Any], object], rows: Any, tries: int
) -> Figures:
    """Measures commits and plain writes alternately, so that noise affects both."""
    pairs = []
    for number in range(tries + 1):
        commit = commit_of(f"b{number}.0")
        pairs.append(
            (_seconds(lambda: write(rows)), _seconds(lambda c=commit: client.commit(rows, c)))  # type: ignore[misc]
        )
    del pairs[0]  # warm-up
    plain, committed = zip(*pairs, strict=True)
    return [
        median(f"{name}.plain", plain, "s", digits=3),
        median(
            name,
            committed,
            "s",
            digits=3,
            of=f"{name}.plain",
            ratios=[ours / theirs for theirs, ours in pairs],
        ),
    ]


def _on_spark(folder: Path, address: tuple[str, int], count: int, tries: int) -> Figures:
    spark = spark_session()
    text = "md5(CAST(id AS string)) AS message_id"
    rows = spark.range(count).selectExpr(text, "id AS n").repartition(2).cache()
    rows.count()
    plain = sink_subjects.delta(folder / "plain-delta-spark").sink.path  # type: ignore[attr-defined]
    host, port = address
    url = f"jdbc:postgresql://{host}:{port}/airflow?user=airflow"
    target = sink_subjects.postgres(host, port).sink.table  # type: ignore[attr-defined]

    def write_delta(rows: Any) -> None:
        rows.write.format("delta").mode("append").save(plain)

    def write_postgres(rows: Any) -> None:
        rows.write.mode("append").jdbc(url, target, properties={"driver": "org.postgresql.Driver"})

    figures: Figures = []
    for name, subject, write in (
        ("delta", sink_subjects.delta(folder / "delta-spark"), write_delta),
        ("postgres", sink_subjects.postgres(host, port), write_postgres),
    ):
        with closing(subject.sink.open_spark(spark, subject.env)) as client:
            figures += _compare(f"sink.spark.{name}", client, write, rows, tries)
    return figures


def _write_parquet(folder: Path, rows: Any) -> None:
    folder.mkdir(exist_ok=True)
    pq.write_table(rows, folder / f"{time.monotonic_ns()}.parquet", compression="zstd")


def _delta(folder: Path) -> Callable[[Any], object]:
    import deltalake

    path = sink_subjects.delta(folder).sink.path  # type: ignore[attr-defined]
    return lambda rows: deltalake.write_deltalake(path, rows, mode="append")


def _iceberg(properties: dict[str, str]) -> Callable[[Any], object]:
    from pyiceberg.catalog import load_catalog

    table = sink_subjects.iceberg(properties).sink.table  # type: ignore[attr-defined]
    catalog = load_catalog("lake", **properties)
    return lambda rows: catalog.load_table(table).append(rows)


def _postgres(address: tuple[str, int]) -> Callable[[Any], object]:
    import psycopg
    from pyarrow import csv

    host, port = address
    table = sink_subjects.postgres(host, port).sink.table  # type: ignore[attr-defined]

    def write(rows: Any) -> None:
        with psycopg.connect(host=host, port=port, user="airflow", dbname="airflow") as session:
            text = pa.BufferOutputStream()
            csv.write_csv(rows, text, csv.WriteOptions(include_header=False))
            statement = f"COPY {table} FROM STDIN (FORMAT csv)"
            with session.cursor().copy(statement) as copy:
                copy.write(text.getvalue().to_pybytes())

    return write


@contextmanager
def _postgresql(folder: Path) -> Iterator[tuple[str, int]]:
    folder.chmod(0o755)  # the server runs as another user
    server = PostgreSQL(folder / "server", "127.0.0.1")
    try:
        host, port = server.url.rpartition("@")[2].partition("/")[0].split(":")
        yield host, int(port)
    finally:
        server.stop()


def _seconds(do: Callable[[], object]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started
