"""The messages of one batcher from all generations of a run, as one stream of tables.

Within a generation messages come in the order in which they were staged: by chunk, and within a
chunk as its processor left them.  Chunks of several generations come by the instant at which each
was received, then by generation.  Memory holds a row group, and the chunk before it, of each
generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import ParquetFile

#: Added to each row: when its chunk was received (microseconds since 1970, never descending within
#: a generation), and the index of its generation.
AT, SOURCE = "_at", "source"

#: Positions in a chunk, where chunks go by position.
CHUNK = 64


def merged(
    folder: Folder, sources: Sequence[Sequence[str]], *, disorder: int = 0
) -> Iterator[pa.Table]:
    """Stream the messages of all sources in order, as tables of some ten thousand rows at most.

    :param sources: The message files of each generation.
    :param disorder: Greater than 0: go within a generation by position alone, by how its source
        gave messages and not by how its processors took them.  None was staged later than so many
        positions after its place.
    """
    streams = [
        _source_by_position(folder, index, files, disorder)
        if disorder
        else _source(folder, index, files)
        for index, files in enumerate(sources)
    ]
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
    """Take from ``heads`` the rows that come before all rows still to be read."""
    instant, bounding = min((head[AT][-1].as_py(), index) for index, head in heads.items())
    taken: list[pa.Table] = []
    for index in sorted(heads):
        head = heads[index]
        compare = pc.less_equal if index <= bounding else pc.less
        count = pc.sum(compare(head[AT], instant)).as_py() or 0
        taken.append(head.slice(0, count))
        if count == head.num_rows:
            del heads[index]
        else:
            heads[index] = head.slice(count)
    table = pa.concat_tables(taken)
    # The sort is stable, and sources stand in order: equal instants stay in order of source.
    return table.take(pc.sort_indices(table, sort_keys=[(AT, "ascending")]))


def only_bytes(folder: Folder, paths: Sequence[str]) -> bool:
    """Whether the data of all messages is bytes or ``None``, in message files without a schema.

    Without any file it is not.
    """
    for path in paths:
        with ParquetFile(folder, path) as file:
            if file.nulls("data_json") < sum(map(file.rows, range(file.groups))):
                return False
    return bool(paths)


def _source(folder: Folder, index: int, paths: Sequence[str]) -> Iterator[pa.Table]:
    """Stream one generation's messages, as tables of whole chunks."""
    held: pa.Table | None = None
    latest: int | None = None
    for path in paths:
        with ParquetFile(folder, path) as file:
            for group in range(file.groups):
                table = file.read(group)
                table = table if held is None else pa.concat_tables([held, table])
                # The next row group may go on with the last chunk.
                whole = pc.less(table["chunk"], table["chunk"][-1])
                held = table.filter(pc.invert(whole))
                table = table.filter(whole)
                if table.num_rows:
                    table, latest = _stamped(table, index, latest)
                    yield table
    if held is not None:
        yield _stamped(held, index, latest)[0]


def _source_by_position(
    folder: Folder, index: int, paths: Sequence[str], disorder: int
) -> Iterator[pa.Table]:
    """The same, as a function of the messages alone, however quick any processor was."""
    held: pa.Table | None = None
    latest: int | None = None
    for path in paths:
        with ParquetFile(folder, path) as file:
            for group in range(file.groups):
                table = file.read(group)
                table = _in_place(table if held is None else pa.concat_tables([held, table]))
                last = table["position"][-1].as_py()
                sure = pc.less(table["chunk"], (last - disorder) // CHUNK)
                held, table = table.filter(pc.invert(sure)), table.filter(sure)
                if table.num_rows:
                    table, latest = _stamped(table, index, latest)
                    yield table
    if held is not None and held.num_rows:
        yield _stamped(held, index, latest)[0]


def _in_place(table: pa.Table) -> pa.Table:
    """The rows by position, in chunks of so many positions."""
    table = table.take(pc.sort_indices(table, sort_keys=[("position", "ascending")]))
    place = table.column_names.index("chunk")
    chunks = pc.divide(table["position"], CHUNK)  # of integers it is one
    return table.set_column(place, table.schema.field(place), chunks)


def _stamped(table: pa.Table, source: int, latest: int | None) -> tuple[pa.Table, int]:
    """Add the columns ``_at`` and ``source`` to whole chunks.

    :param latest: The last ``_at`` before them; the new one is returned.
    """
    table = table.combine_chunks()
    chunk: Any = table["chunk"].combine_chunks()
    ends: Any = pc.run_end_encode(chunk).run_ends
    starts = pa.concat_arrays([array_of([0], ends.type), ends.slice(0, len(ends) - 1)])
    received = table["received_at"].combine_chunks().cast(pa.int64()).take(starts)
    # A clock may be set back: what was received later never counts as earlier.
    instants: Any = pc.cumulative_max(received)
    if latest is not None:
        instants = pc.max_element_wise(instants, latest)
    expanded = pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends, instants))
    sources = pa.repeat(pa.scalar(source, pa.int32()), table.num_rows)
    stamped = table.append_column(AT, expanded).append_column(SOURCE, sources)
    return stamped, instants[-1].as_py()
