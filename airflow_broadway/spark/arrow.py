"""Staging in a store for which Spark's Hadoop has no file system, through fsspec and Arrow.

The driver uses staging's own client.  Executors read the data files with the same client and Arrow,
and pass record batches to Spark: no row goes through the driver.  They act with the credentials
that the driver has when a batch begins.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.errors import StagingError
from airflow_broadway.staging.client import client_options, usable_options
from airflow_broadway.staging.errors import cannot, translated
from airflow_broadway.staging.store import Folder, Store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

#: Bytes of a batch's messages per task of Spark.
TASK_BYTES = 16 * 1024 * 1024
#: Rows of a record batch.
ROWS = 10_000


class ArrowFiles(Folder):
    """The folder of a run; see :class:`airflow_broadway.core.formats.files.Files`.

    :param uri: ``<root>/<pipeline>/<dag_id>/<run_id>``.
    :param options: The result of :func:`airflow_broadway.staging.client.client_options`.
    :raises StagingError: If the client cannot be opened.
    """

    def __init__(self, uri: str, options: Mapping[str, Any]) -> None:
        self._uri = re.sub("^s3[an]://", "s3://", uri)
        root, *path = self._uri.rsplit("/", 3)
        super().__init__(Store.open(root, **usable_options(options)), "/".join(path))
        #: Data files that exist.
        self._known: set[str] = set()

    def check_executor(self, spark: SparkSession, path: str) -> None:
        """Reads a file in an executor.

        :raises StagingError: Naming what the executor lacks, before any batch begins.
        """
        uri, options = self._uri, client_options(self.store.fs)
        cause: Exception | None = None

        def look(tasks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import pyarrow as pa
            import pyarrow.parquet as pq  # noqa: F401

            for _ in tasks:
                text = ""
                try:
                    ArrowFiles(uri, options).read(path)
                except Exception as error:
                    text = f"{socket.gethostname()!r}: {type(error).__name__}: {error}"
                yield pa.RecordBatch.from_pydict({"text": [text]})

        try:
            [(text,)] = spark.range(0, 1, 1, 1).mapInArrow(look, "text string").collect()
        except Exception as error:  # its Python has no airflow_broadway, or does not start
            cause = error
            lines = [line for line in str(error).splitlines() if "Error: " in line]
            text = (lines or [f"{type(error).__name__}: {error}"])[-1].strip()
        if text:
            raise StagingError(
                f"an executor cannot read {self._uri} through Arrow ({text}); its Python needs"
                " pyarrow, pandas, and fsspec with the client of the store (s3fs for S3), and the"
                " host access to it; or give Spark a Hadoop file system for it"
            ) from cause

    def rows(
        self,
        spark: SparkSession,
        paths: Sequence[str],
        ranges: Sequence[Sequence[int]],
        schema: StructType,
        size: int,
    ) -> DataFrame:
        """Returns the rows of the row groups that hold batches of ``ranges``; starts no job.

        :param paths: Data files.
        :param schema: The columns to read.
        :param size: The bytes of the messages, which determine the number of tasks.
        :raises FileNotFoundError: If a file is missing.
        """
        for path in paths:
            if path not in self._known and not self.exists(path):
                raise FileNotFoundError(f"{self._uri}/{path}")
            self._known.add(path)
        parts = max(1, -(-size // TASK_BYTES))
        read = _reader(self._uri, client_options(self.store.fs), paths, ranges, schema.names, parts)
        return spark.range(0, parts, 1, parts).mapInArrow(read, schema)

    def why_unreadable(self, error: BaseException) -> str:
        """Returns why an executor could not read this root; empty if it did not fail by that."""
        match = re.search(f"StagingError: (.* {re.escape(self.store.uri)}: .*)", str(error))
        return match[1] if match else ""


def _reader(
    uri: str,
    options: Mapping[str, Any],
    paths: Sequence[str],
    ranges: Sequence[Sequence[int]],
    names: Sequence[str],
    parts: int,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Returns the function that reads the data files in an executor.

    Of the row groups that hold batches of ``ranges``, task *n* reads every ``parts``-th.
    """

    def read(tasks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = ArrowFiles(uri, options)
        for task in tasks:
            for part in task.column(0).to_pylist():
                mine = map(part.__eq__, cycle(range(parts)))
                for path in paths:
                    try:
                        with translated(f"read {path}", files.store.uri):
                            yield from _rows(files, path, ranges, names, mine)
                    except FileNotFoundError as error:
                        raise cannot(f"read {path}", files.store.uri, error) from error

    return read


def _rows(
    files: Folder,
    path: str,
    ranges: Sequence[Sequence[int]],
    names: Sequence[str],
    mine: Iterator[bool],
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of the row groups of a file that hold batches of ``ranges``.

    :param mine: Whether to read the next one of them.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with (
        files.source(path) as source,
        pq.ParquetFile(source, pre_buffer=True, page_checksum_verification=True) as file,
    ):
        metadata: Any = file.metadata
        wanted = [name for name in names if name in file.schema_arrow.names]
        leaves = [metadata.schema.column(index).path for index in range(len(metadata.schema))]
        for number in range(metadata.num_row_groups):
            bounds = metadata.row_group(number).column(leaves.index("batch")).statistics
            if not any(low <= bounds.max and bounds.min <= high for low, high in ranges):
                continue
            if not next(mine):
                continue
            for rows in file.iter_batches(ROWS, [number], wanted, use_threads=False):
                columns = dict(zip(wanted, rows.columns, strict=True))
                for name in set(names) - columns.keys():  # of producers that keep no payload
                    kind = pa.binary() if name == "_payload" else pa.string()
                    columns[name] = pa.nulls(rows.num_rows, kind)
                yield pa.RecordBatch.from_arrays([columns[name] for name in names], list(names))
