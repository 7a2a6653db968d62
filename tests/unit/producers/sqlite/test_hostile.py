"""Rows written by another program into the queue file: each fails alone."""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Verdict
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.testing.clock import ManualClock

ANYTHING = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.binary(max_size=20),
)
COLUMNS = ("body", "attributes", "enqueued_at", "attempt", "deliveries")


@pytest.fixture
def queue(tmp_path):
    with SqliteQueue(tmp_path / "q.db", "q", clock=ManualClock()) as queue_file:
        yield queue_file


def execute(queue: SqliteQueue, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(queue.path)) as db:
        db.execute(statement, values)
        db.commit()


def spoil(queue: SqliteQueue, row: int, column: str, value: Any) -> None:
    table = "bodies" if column in ("body", "attributes") else "messages"
    with closing(sqlite3.connect(queue.path)) as db:
        row += db.execute("SELECT min(id) - 1 FROM messages").fetchone()[0]
    if column == "body" and value is None:
        execute(queue, "DELETE FROM bodies WHERE id = ?", row)
    else:
        execute(queue, f"UPDATE OR IGNORE {table} SET {column} = ? WHERE id = ?", value, row)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("body", None),
        ("attributes", "{no JSON"),
        ("attributes", b"\xff\xfe\xfd"),
        ("attributes", "[" * 100_000),
        ("enqueued_at", 2**62),
        ("enqueued_at", "yesterday"),
        ("attempt", "first"),
        ("deliveries", b"\x00"),
    ],
)
def test_unreadable_row_is_dead_lettered_alone(queue, column, value):
    ids = queue.send([b"a", (b"b", {"k": 1}), b"c"])
    spoil(queue, 2, column, value)

    messages = queue.receive("g", 10)

    assert sorted(message.data for message in messages) == [b"a", b"c"]
    [letter] = queue.dead_letters()
    assert (letter.message_id, letter.stage) == (ids[1], "receive")
    assert letter.reason.startswith("cannot be read: ")
    assert queue.settle("g", Settlement(rest=ACK, expected=2)).acked == 2
    assert queue.depth()[:4] == (0, 0, 0, 1)


def test_full_demand_of_unreadable_rows_is_not_empty(queue):
    queue.send([(b"%d" % number, {"k": 1}) for number in range(5)])
    queue.send([b"good"])
    for row in range(1, 6):
        spoil(queue, row, "attributes", "{")

    assert [message.data for message in queue.receive("g", 2)] == [b"good"]
    assert len(queue.dead_letters()) == 5


def test_text_body_is_read_as_utf_8(queue):
    queue.send([b"a"])
    spoil(queue, 1, "body", "zażółć")

    [message] = queue.receive("g", 1)

    assert message.data == "zażółć".encode()


def test_lease_with_unreadable_owner_is_listed(queue):
    queue.send([b"a"])
    queue.receive("g", 1, owner={"dag_id": "d"})
    execute(queue, "UPDATE leases SET owner = '['")

    [record] = queue.leases()

    assert (record.lease.generation, record.lease.owner) == ("g", {})


@settings(max_examples=60, deadline=None)
@given(
    spoiled=st.lists(st.tuples(st.integers(1, 8), st.sampled_from(COLUMNS), ANYTHING), max_size=6)
)
def test_hostile_rows_leave_others_intact(spoiled):
    with (
        tempfile.TemporaryDirectory() as folder,
        SqliteQueue(Path(folder) / "q.db", "q", clock=ManualClock()) as queue,
    ):
        ids = queue.send([(b"%d" % number, {"n": number}) for number in range(8)])
        for row, column, value in spoiled:
            spoil(queue, row, column, value)

        messages = queue.receive("g", 100)

        received = [message.message_id for message in messages]
        dead = [letter.message_id for letter in queue.dead_letters()]
        assert sorted([*received, *dead]) == sorted(ids)
        touched = {row for row, _, _ in spoiled}
        assert {key for row, key in enumerate(ids, 1) if row not in touched} <= set(received)
        report = queue.settle("g", Settlement(rest=ACK, expected=len(received)))
        assert report.acked == len(received)


# ---------------------------------------------------------------------------- lease and manifest


def entries(ids: list[str], verdict: Verdict = ACK) -> Iterator[Entry]:
    return (Entry(key, "", verdict) for key in ids)


def test_equal_counts_do_not_hide_different_messages(queue):
    ids = queue.send([b"a", b"b", b"c"])
    queue.receive("g", 3)
    execute(queue, "DELETE FROM messages WHERE id = (SELECT min(id) FROM messages)")

    report = queue.settle(
        "g", Settlement(rest=ACK, everything=lambda: entries(ids[:2]), expected=2)
    )

    # "c" was never staged: it is not acknowledged, though two are leased and two named.
    assert (report.acked, report.released, report.lapsed) == (1, 1, 1)
    assert [message.data for message in queue.receive("h", 3)] == [b"c"]


def test_release_reports_missing_messages(queue):
    queue.send([b"a", b"b"])
    queue.receive("g", 2)
    execute(queue, "DELETE FROM messages WHERE id = (SELECT min(id) FROM messages)")

    report = queue.settle("g", Settlement(rest=RELEASE))

    assert (report.released, report.lapsed) == (1, 1)


# ---------------------------------------------------------------------------------- permissions


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_database_files_are_private(tmp_path, umask):
    before = os.umask(umask)
    try:
        with SqliteQueue(tmp_path / "q.db", "q") as queue:
            queue.send([b"secret"])
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    finally:
        os.umask(before)

    assert modes == {"q.db": 0o600, "q.db-shm": 0o600, "q.db-wal": 0o600}


def test_shared_folder_grants_group_access(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2770)

    with SqliteQueue(shared / "q.db", "q") as queue:
        queue.send([b"a"])
        modes = {stat.S_IMODE(path.stat().st_mode) for path in shared.iterdir()}

    assert modes == {0o660}
