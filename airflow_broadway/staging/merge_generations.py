"""The messages of one batcher from all generations of a run, as one stream of tables.

Within a generation messages come in order of chunks, and within a chunk as its processor left them;
between generations by the instant at which each chunk was received, then by generation.  A file may
hold chunks out of order (several processors): row groups are read by the least chunk that they
hold, and rows wait until no unread group can hold an earlier chunk.  So memory holds a row group
per generation, and more only where the groups of one overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import ParquetFile

__all__ = ["AT", "SOURCE", "merged", "only_bytes"]

#: Added to each row: when its chunk was received (microseconds since 1970, never descending within
#: a generation), and the index of its generation.
AT, SOURCE = "_at", "source"
#: Where a row was written, while groups are not read in that order.
_PLACE = "_place"


class _Group(NamedTuple):
    first_chunk: int
    file: int
    group: int


def merged(folder: Folder, sources: Sequence[Sequence[str]]) -> Iterator[pa.Table]:
    """Stream the messages of all sources in order, as tables of a few ten thousand rows at most.

    :param sources: For each generation its message files.
    """
    streams = [_source(folder, index, files) for index, files in enumerate(sources)]
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
    """Take from ``heads`` all that no later table of any source can come before."""
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
    """Whether all messages of some files without a schema have bytes for data; false for none."""
    for path in paths:
        with ParquetFile(folder, path) as file:
            if file.nulls("data_bytes"):
                return False
    return bool(paths)


def _source(folder: Folder, index: int, paths: Sequence[str]) -> Iterator[pa.Table]:
    """Stream one generation's messages in order of chunks."""
    groups: list[_Group] = []
    for number, path in enumerate(paths):
        with ParquetFile(folder, path) as file:
            groups += [
                _Group(file.bounds(group, "chunk")[0], number, group)
                for group in range(file.groups)
                if file.rows(group)
            ]
    written = list(groups)
    groups.sort()
    places: dict[_Group, int] = {}
    if groups != written:
        # A chunk may be cut by the end of a group: its rows keep the order they were written in.
        places = {group: place << 32 for place, group in enumerate(written)}
    held: pa.Table | None = None
    latest: int | None = None
    opened: tuple[int, ParquetFile] | None = None
    try:
        for place, found in enumerate(groups):
            if opened is None or opened[0] != found.file:
                if opened is not None:
                    opened[1].close()
                opened = found.file, ParquetFile(folder, paths[found.file])
            table = opened[1].read(found.group)
            if places:
                start = places[found]
                rows = array_of(range(start, start + table.num_rows), pa.int64())
                table = table.append_column(_PLACE, rows)
            table = table if held is None else pa.concat_tables([held, table])
            if place + 1 < len(groups):
                early = pc.less(table["chunk"], groups[place + 1].first_chunk)
                held = table.filter(pc.invert(early))
                table = table.filter(early)
            if table.num_rows:
                table, latest = _stamped(table, index, latest)
                yield table
    finally:
        if opened is not None:
            opened[1].close()


def _stamped(table: pa.Table, source: int, latest: int | None) -> tuple[pa.Table, int]:
    """Sort whole chunks, and add the columns ``_at`` and ``source``."""
    table = table.combine_chunks()
    keys = [name for name in ("chunk", _PLACE) if name in table.column_names]
    order = pc.sort_indices(table, sort_keys=[(name, "ascending") for name in keys])
    table = table.take(order).select([name for name in table.column_names if name != _PLACE])
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
