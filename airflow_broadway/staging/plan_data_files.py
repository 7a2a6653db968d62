"""Writes the data files of a plan, with rows in order of batch for cheap access to a batch.

Rows arrive in order of receipt, each with the number of its batch.  They are buffered; a full
buffer is sorted by that number and written as row groups.  A batch with many rows in the buffer
gets its own groups, small ones share.  The statistics of the ``batch`` column then lead a reader
(also Spark's filter on ``batch``) to the groups of a batch.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.schema.encoding import BASE64, encode_json
from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import TableFiles, data_schema

#: Approximate capacity of the buffer in rows and in bytes.
BUFFER_ROWS = 131_072
BUFFER_BYTES = 32 * 1024 * 1024
#: Rows of a batch in the buffer from which it gets its own row groups.
OWN_GROUP_ROWS = 4_096


class DataFiles:
    """Writes the data files of one plan.

    :param as_bytes: See :func:`airflow_broadway.staging.tables.data_schema`.
    """

    def __init__(
        self, folder: Folder, path: str, options: Batcher, producer: Producer, *, as_bytes: bool
    ) -> None:
        self._schema = data_schema(options, producer, as_bytes=as_bytes)
        self._files = TableFiles(folder, f"{path}/data", self._schema)
        self._python = options.engine == "python"
        self._mixed = options.schema is None and not self._python and not as_bytes
        self._as_bytes = options.schema is None and not self._python and as_bytes
        self._tables: list[pa.Table] = []
        self._rows = 0
        self._bytes = 0

    def add(self, table: pa.Table, batches: list[int]) -> bool:
        """Buffers the rows of a merged table with their batches; returns whether it is full."""
        shaped = self._shape(table, batches)
        self._tables.append(shaped)
        self._rows += shaped.num_rows
        self._bytes += shaped.nbytes
        return self._rows >= BUFFER_ROWS or self._bytes >= BUFFER_BYTES

    def flush(self) -> tuple[int, list[int]]:
        """Writes the buffer.

        :returns: The index of the file, and the numbers of the batches with rows in the buffer.
        """
        if not self._rows:
            return 0, []
        table = pa.concat_tables(self._tables).combine_chunks()
        self._tables, self._rows, self._bytes = [], 0, 0
        table = table.take(pc.sort_indices(table, sort_keys=[("batch", "ascending")]))
        runs: Any = pc.run_end_encode(table["batch"].combine_chunks())
        groups = _groups(runs.run_ends.to_pylist())
        index = self._files.write(table.slice(start, stop - start) for start, stop in groups)
        return index, runs.values.to_pylist()

    @property
    def names(self) -> list[str]:
        """Names of the files so far, by index."""
        return [path.rpartition("/")[2] for path in self._files.paths]

    def close(self) -> None:
        """Finishes the last file durably; call :meth:`flush` before."""
        self._files.close()

    def abort(self) -> None:
        """Discards the unfinished file."""
        self._files.abort()

    def _shape(self, table: pa.Table, batches: list[int]) -> pa.Table:
        """Converts rows to the columns of the data files."""
        columns: dict[str, Any] = {name: table[name] for name in table.column_names}
        columns["batch"] = array_of(batches, pa.int64())
        columns["_flush"], columns["_size"] = table["flush"], table["size"]
        if not self._python:
            columns["batch_key"] = _to_spark_keys(table["batch_key"])
        if self._as_bytes:
            columns["data"] = table["data_bytes"]
        elif self._mixed:
            columns["data"] = _to_json_texts(table)
        arrays = [columns[name] for name in self._schema.names]
        return pa.Table.from_arrays(arrays, schema=self._schema)


def _groups(ends: list[int]) -> Iterator[tuple[int, int]]:
    """Divides sorted rows into row groups, by the ends of the batches' rows."""
    start = begun = 0
    for end in ends:
        if end - begun >= OWN_GROUP_ROWS:
            if begun > start:
                yield start, begun
            yield begun, end
            start = end
        elif end - start >= OWN_GROUP_ROWS:
            yield start, end
            start = end
        begun = end
    if begun > start:
        yield start, begun


def _to_spark_keys(column: pa.ChunkedArray[Any]) -> pa.Array[Any]:
    """Converts keys for Spark: text unchanged, any other value as JSON text."""
    encoded: Any = column.combine_chunks().dictionary_encode()
    texts = [spark_key(text) for text in encoded.dictionary.to_pylist()]
    keys: pa.Array[Any] = array_of(texts, pa.string()).take(encoded.indices)
    return keys


def spark_key(text: str) -> str:
    """Converts a key's JSON text for Spark."""
    return json.loads(text) if text.startswith('"') else text


def _to_json_texts(table: pa.Table) -> Any:
    """Converts data to JSON text, including bytes."""
    texts, raw = table["data_json"], table["data_bytes"]
    if raw.null_count == len(raw):
        return texts
    values = [
        text if blob is None else _quote(blob)
        for text, blob in zip(texts.to_pylist(), raw.to_pylist(), strict=True)
    ]
    return array_of(values, pa.string())


def _quote(blob: bytes) -> str:
    """Encodes bytes as a JSON string of their text, or of ``base64:`` and their Base64."""
    try:
        return encode_json(blob.decode("utf-8"))
    except UnicodeDecodeError:
        return encode_json(BASE64 + base64.b64encode(blob).decode("ascii"))
