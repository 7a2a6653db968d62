"""Merges the messages of one batcher from all generations of a run into one stream of tables.

Within a generation messages keep the order in which they were staged: by chunk, and within a chunk
by its processor.  Chunks of several generations are ordered by time of receipt, then by generation.
Memory holds a row group and the previous chunk of each generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import ParquetFile

#: Added columns: the time of receipt of the row's chunk (microseconds since 1970, ascending within
#: a generation), and the index of its generation.
AT, SOURCE = "_at", "source"

#: Positions per chunk, if chunks are formed by position.
CHUNK = 64


def merged(
    folder: Folder, sources: Sequence[Sequence[str]], *, disorder: int = 0
) -> Iterator[pa.Table]:
    """Streams the messages of all sources in order, as tables of at most some ten thousand rows.

    :param sources: The message files of each generation.
    :param disorder: If greater than 0, a generation is ordered by position, which is the order of
        its source regardless of its processors.  No message was staged more than so many positions
        after its place.
    """
    streams = [_stream(folder, index, files, disorder) for index, files in enumerate(sources)]
    if len(streams) == 1:
        yield from streams[0]
        return
    heads: dict[int, pa.Table] = {}
    live = dict(enumerate(streams))
    while live or heads:
        for index in list(live):
            if index not in heads:
                head = next(live[index], None)
                if head is None:
                    del live[index]
                else:
                    heads[index] = head
        if heads:
            yield _earliest(heads)


def _earliest(heads: dict[int, pa.Table]) -> pa.Table:
    """Takes from ``heads`` the rows that precede all rows still to be read."""
    latest_time, bounding = min((head[AT][-1].as_py(), index) for index, head in heads.items())
    taken: list[pa.Table] = []
    for index in sorted(heads):
        head = heads[index]
        compare = pc.less_equal if index <= bounding else pc.less
        count = pc.sum(compare(head[AT], latest_time)).as_py() or 0
        taken.append(head.slice(0, count))
        if count == head.num_rows:
            del heads[index]
        else:
            heads[index] = head.slice(count)
    table = pa.concat_tables(taken)
    # The sort is stable, and sources are in order: equal timestamps stay in order of source.
    return table.take(pc.sort_indices(table, sort_keys=[(AT, "ascending")]))


def only_bytes(folder: Folder, paths: Sequence[str]) -> bool:
    """Whether the data of all messages is bytes or ``None``, in message files without a schema.

    ``False`` without any file.
    """
    for path in paths:
        with ParquetFile(folder, path) as file:
            if file.nulls("data_json") < sum(map(file.rows, range(file.groups))):
                return False
    return bool(paths)


def _stream(folder: Folder, index: int, paths: Sequence[str], disorder: int) -> Iterator[pa.Table]:
    """Streams one generation's messages, as tables of whole chunks.

    :param disorder: See :func:`merged`.
    """
    pending: pa.Table | None = None
    latest: int | None = None
    for path in paths:
        with ParquetFile(folder, path) as file:
            for group in range(file.groups):
                table = file.read(group)
                table = table if pending is None else pa.concat_tables([pending, table])
                if disorder:
                    table = _sorted(table)
                    end = (table["position"][-1].as_py() - disorder) // CHUNK
                else:
                    end = table["chunk"][-1]  # the next row group may continue this chunk
                whole = pc.less(table["chunk"], end)
                pending, table = table.filter(pc.invert(whole)), table.filter(whole)
                if table.num_rows:
                    table, latest = _stamp(table, index, latest)
                    yield table
    if pending is not None and pending.num_rows:
        yield _stamp(pending, index, latest)[0]


def _sorted(table: pa.Table) -> pa.Table:
    """Sorts rows by position, and forms chunks of :data:`CHUNK` positions."""
    table = table.take(pc.sort_indices(table, sort_keys=[("position", "ascending")]))
    place = table.column_names.index("chunk")
    chunks = pc.divide(table["position"], CHUNK)  # integer division
    return table.set_column(place, table.schema.field(place), chunks)


def _stamp(table: pa.Table, source: int, latest: int | None) -> tuple[pa.Table, int]:
    """Adds the columns ``_at`` and ``source`` to whole chunks.

    :param latest: The last ``_at`` before them; the new one is returned.
    """
    table = table.combine_chunks()
    chunk: Any = table["chunk"].combine_chunks()
    ends: Any = pc.run_end_encode(chunk).run_ends
    starts = pa.concat_arrays([array_of([0], ends.type), ends.slice(0, len(ends) - 1)])
    received = table["received_at"].combine_chunks().cast(pa.int64()).take(starts)
    # A clock may be set back: a later receipt must not get an earlier time.
    times: Any = pc.cumulative_max(received)
    if latest is not None:
        times = pc.max_element_wise(times, latest)
    expanded = pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends, times))
    sources = pa.repeat(pa.scalar(source, pa.int32()), table.num_rows)
    stamped = table.append_column(AT, expanded).append_column(SOURCE, sources)
    return stamped, times[-1].as_py()
