from __future__ import annotations

import json
import multiprocessing
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from unittest import mock

import pytest

from airflow_broadway.core.custody.dead_letters import Choice, Moved
from airflow_broadway.core.custody.protocol import Entry, QueueDepth, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import LeaseLapsed, ProducerError
from airflow_broadway.producers.sqlite import SqliteQueue, database, leases, queue
from airflow_broadway.testing.clock import ManualClock

DEAD = Verdict(Action.DEAD_LETTER, 0.0, "too old", "process")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "queue.db"


@pytest.fixture
def flights(path, clock):
    return SqliteQueue(path, "flights", clock=clock)


def test_missing_file_is_empty_queue_until_first_send(flights, path):
    assert flights.receive("g", 10) == []
    assert flights.depth() == QueueDepth(0, 0, 0, 0, None)
    assert flights.leases() == []
    assert flights.dead_letters() == []
    assert flights.renew("g", 1.0) is None
    assert not flights.holds("g")
    for move in (flights.delete, flights.requeue):
        with pytest.raises(ProducerError, match="there is no queue file"):
            move()
    assert flights.settle("g", Settlement(rest=ACK, expected=3)) == SettleReport(lapsed=3)
    assert not path.exists()

    flights.send([b"one"])

    assert path.exists()


def test_messages_are_received_in_order_with_attributes(flights, clock):
    bodies: list[Any] = [b"\xff", "żółw", (b"c", {"origin": "EWR", "tags": ["a", 1]})]
    keys = flights.send([*bodies, bytearray(b"d"), memoryview(b"e")])
    clock.advance(2.0)

    messages = flights.receive("g", 10)

    assert [message.data for message in messages] == [b"\xff", "żółw".encode(), b"c", b"d", b"e"]
    assert [message.message_id for message in messages] == keys
    assert [message.position for message in messages] == [0, 1, 2, 3, 4]
    assert messages[0].received_at == clock.now()
    assert messages[0].metadata == {"queue": "flights", "enqueued_at": "2026-01-01T00:00:00+00:00"}
    assert messages[2].metadata["attributes"] == {"origin": "EWR", "tags": ["a", 1]}


def test_ids_are_never_reused(flights):
    first = flights.send([b"a", b"b"])
    flights.receive("g", 10)
    flights.settle("g", Settlement(rest=ACK))

    assert not set(flights.send([b"c", b"d"])) & set(first)


@pytest.mark.parametrize("in_place", [True, False])
def test_restored_backup_reuses_no_id(path, clock, in_place):
    backup = path.with_name("backup.db")
    with closing(SqliteQueue(path, "flights", clock=clock)) as queue:
        before = queue.send([b"before"] * 50)
        clock.advance(1.0)
        with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(backup)) as copy:
            live.backup(copy)
        lost = queue.send([b"lost"] * 50)
        clock.advance(1.0)

        if in_place:
            with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(backup)) as copy:
                copy.backup(live)
        else:
            queue.close()
            for name in (path, path.with_name(f"{path.name}-wal"), path.with_name("x-shm")):
                name.unlink(missing_ok=True)
            backup.rename(path)
        after = queue.send([b"after"] * 50)

        assert len({*before, *lost, *after}) == 150
        assert queue.depth().ready == 100


def test_queues_of_one_file_do_not_mix(path, clock):
    one, two = (SqliteQueue(path, name, clock=clock) for name in ("one", "two"))
    for number in range(6):
        (one, two)[number % 2].send([str(number)])

    assert [m.data for m in one.receive("g", 10)] == [b"0", b"2", b"4"]
    assert two.depth().ready == 3
    assert one.delete() == two.delete() == Moved(0)
    assert one.depth()[:3] == (0, 0, 3)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (12, "message 1 was not sent: expected a body of bytes or text, got: 12"),
        (None, "expected a body of bytes or text, got: None"),
        ((b"a",), "expected a body, (body, attributes) or (body, attributes, delay), got: (b'a',)"),
        ((b"a", [1]), "expected attributes in a mapping, got: [1]"),
        ((b"a", {"at": object()}), "attributes are no JSON"),
        ((b"a", {"x": float("nan")}), "attributes are no JSON"),
        ((b"a", None, -1), "expected a delay in seconds of at least 0, got: -1"),
        ((b"a", None, "soon"), "expected a delay in seconds of at least 0, got: 'soon'"),
        ((b"a", None, float("nan")), "expected a delay in seconds of at least 0, got: nan"),
        ("\ud800", "its text cannot be encoded as UTF-8"),
        (b"x" * 101, "its body has 101 bytes, and a row holds at most 100"),
    ],
)
def test_unsendable_message_fails_whole_send(flights, monkeypatch, message, text):
    monkeypatch.setattr(queue, "MAX_BODY", 100)

    flights.send([b"x" * 100])
    with pytest.raises(ProducerError) as error:
        flights.send([b"fine", message])

    assert text in str(error.value)
    assert flights.depth().ready == 1


@pytest.mark.parametrize("name", ["", None, 3])
def test_queue_needs_name(path, name):
    with pytest.raises(ProducerError, match="a queue's name is a non-empty string"):
        SqliteQueue(path, name)


def test_receive_stops_at_max_bytes(flights, monkeypatch):
    monkeypatch.setattr(queue, "MAX_RECEIVE_BYTES", 100)
    flights.send([b"x" * 60] * 5)

    assert [len(flights.receive("g", 10)) for _ in range(3)] == [2, 2, 1]


def test_dead_letter_keeps_metadata(flights, clock):
    [key] = flights.send([(b"\xfe", {"origin": "JFK"})])
    sent = clock.now()
    clock.advance(5.0)
    flights.receive("g1", 1)
    flights.settle("g1", Settlement(rest=Verdict(Action.DEAD_LETTER, 0.0, "é" * 2000, "batch")))

    [letter] = flights.dead_letters()

    assert letter.message_id == key
    assert letter.body == b"\xfe"
    assert letter.properties == {"origin": "JFK"}
    assert letter.reason == "é" * 1022 + "…"
    assert (letter.stage, letter.attempt, letter.generation) == ("batch", 1, "g1")
    assert (letter.enqueued_at, letter.died_at) == (sent, clock.now())
    assert flights.depth().dead == 1


def test_requeued_dead_letters_keep_ids_on_first_attempt(flights, clock):
    keys = flights.send([b"a", b"b", b"c"])
    flights.receive("g1", 3)
    flights.settle("g1", Settlement(rest=DEAD))
    assert len(flights.dead_letters(limit=2)) == 2
    assert [d.message_id for d in flights.dead_letters(limit=None)] == keys

    unknown = f"{keys[2]}9"
    chosen = Choice(ids=frozenset([keys[0], "nonsense", unknown]))
    assert flights.requeue(chosen) == Moved(1, (unknown, "nonsense"))
    [message] = flights.receive("g2", 3)
    assert (message.message_id, message.data, message.attempt) == (keys[0], b"a", 1)
    assert message.redelivered

    assert flights.delete(Choice(ids=frozenset([keys[1]]))).count == 1
    assert flights.requeue(Choice(ids=frozenset())) == Moved(0)
    assert flights.requeue().count == 1
    assert flights.depth() == QueueDepth(1, 0, 1, 0, 0.0)


def test_settled_messages_leave_no_bytes_in_file(flights):
    flights.send([b"x"] * 10)
    flights.receive("g", 4)
    flights.settle("g", Settlement(rest=ACK))
    flights.receive("g2", 2)
    flights.settle("g2", Settlement(rest=DEAD))
    flights.delete()
    flights.receive("g3", 4)
    flights.settle("g3", Settlement(rest=ACK))

    with sqlite3.connect(flights.path) as db:
        for table in ("messages", "bodies", "dead"):
            assert db.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (0,)
    db.close()


def test_open_leases_are_listed_with_owners(flights, clock):
    flights.send([b"x"] * 5)
    flights.receive("g1", 2, seconds=60.0, owner={"dag_id": "d", "run_id": "r"})
    flights.receive("g2", 1, seconds=30.0)
    flights.release("g2")

    [record] = flights.leases()
    assert record.lease.generation == "g1"
    assert record.lease.owner == {"dag_id": "d", "run_id": "r"}
    assert record.lease.state == {"path": flights.path, "queue": "flights"}
    assert (record.state, record.received, record.held) == ("open", 2, 2)
    assert record.report is None
    both = flights.leases(ended=True)
    assert [r.state for r in both] == ["open", "released"]
    assert both[1].report == SettleReport(released=1)


def test_early_verdicts_stand_outside_report(flights):
    keys = flights.send([b"x"] * 5)
    flights.receive("g", 5)
    early = [Entry(keys[0], "", ACK), Entry(keys[1], "", DEAD)]

    assert flights.settle_now("g", early) == SettleReport(acked=1, dead_lettered=1)
    # A repeated call reports the same, and the first verdict stands.
    again = [Entry(keys[0], "", DEAD), Entry(keys[1], "", ACK)]
    assert flights.settle_now("g", again) == SettleReport(acked=1, dead_lettered=1)

    # A manifest may include them: they are not reported as lapsed.
    assert flights.settle("g", Settlement(rest=ACK, expected=5)) == SettleReport(acked=3)


def test_ended_lease_receives_nothing(flights):
    flights.send([b"x"])
    assert flights.release("g") == SettleReport()

    with pytest.raises(LeaseLapsed, match=r"'g' receives no more .* was released at 2026-01-01"):
        flights.receive("g", 1)


def test_messages_of_an_unknown_lease_come_again(flights):
    [key] = flights.send([b"x"])
    report = flights.settle("g", Settlement(rest=ACK, expected=1))

    assert report.lapsed == 1
    assert report.again is not None
    assert report.again.has(key)


def test_messages_outside_manifest_are_not_acknowledged(flights):
    keys = flights.send([b"x"] * 3)
    flights.receive("g", 3)

    with pytest.raises(ProducerError, match="holds 3 messages and its manifest names 2"):
        flights.settle("g", Settlement(rest=ACK, expected=2))
    named = [Entry(key, "", ACK) for key in keys[:2]]
    report = flights.settle("g", Settlement(rest=ACK, expected=2, everything=lambda: iter(named)))

    assert report == SettleReport(acked=2, released=1)


def test_verdict_on_foreign_id_settles_nothing(flights):
    flights.send([b"x"] * 2)
    own = flights.receive("g", 2)[0].message_id.rpartition("-")[0]
    for foreign in ("", "x", "a-1", "0123456789abcdef-1", f"{own}-１", f"{own}-01"):
        bad = Entry(foreign, "", RELEASE)
        with pytest.raises(ProducerError, match="not of this queue: nothing was settled"):
            flights.settle("g", Settlement(rest=ACK, entries=lambda bad=bad: iter([bad])))  # type: ignore[misc]
        report = flights.settle_now("g", [bad])
        assert (report.failed, report.total) == (1, 1)
        assert report.undone == {foreign}
        assert report.errors
    assert flights.depth().leased == 2


def test_message_with_changed_id_is_released_alone(flights):
    # Given a message whose id a transformer changed, and which failed under that id
    keys = flights.send([b"x"] * 3)
    flights.receive("g", 3)
    named = [Entry(key, "", ACK) for key in ("mine", keys[1], keys[2])]
    entries = [Entry("mine", "", DEAD), Entry(keys[1], "", DEAD)]
    settlement = Settlement(
        rest=ACK, entries=lambda: iter(entries), everything=lambda: iter(named), expected=3
    )

    report = flights.settle("g", settlement)

    # Then its verdict settles nothing
    assert (report.dead_lettered, report.acked, report.released) == (1, 1, 1)
    assert "'mine' could not be settled: its id is not of this queue" in report.errors[0]
    [again] = flights.receive("g2", 3)
    assert again.message_id == keys[0]


def test_expired_lease_is_usable_until_messages_are_leased_again(flights, clock):
    flights.send([b"x"] * 2)
    flights.receive("g", 2, seconds=60.0)
    clock.advance(61.0)
    assert not flights.holds("g")
    assert flights.depth() == QueueDepth(2, 0, 0, 0, 61.0)

    assert flights.renew("g", 60.0) is not None
    assert flights.holds("g")
    assert flights.receive("other", 1) == []

    clock.advance(61.0)
    assert not flights.holds("g")
    assert flights.settle("g", Settlement(rest=ACK)) == SettleReport(acked=2)


def test_reports_expire_after_retention(path, clock):
    with SqliteQueue(path, "q", clock=clock) as queue_file:
        keys = queue_file.send([b"x"] * 3)
        queue_file.receive("old", 1)
        queue_file.settle_now("old", [Entry(keys[0], "", ACK)])
        queue_file.release("old")
        clock.advance(leases.RETENTION + 1.0)
        queue_file.receive("new", 1)
        queue_file.release("new")

        assert [r.lease.generation for r in queue_file.leases(ended=True)] == ["new"]


def test_threads_share_a_queue(path):
    shared = SqliteQueue(path, "q")
    received: list[str] = []

    def work(number: int) -> None:
        shared.send([b"x"] * 50)
        while messages := shared.receive(f"g{number}", 7):
            received.extend(message.message_id for message in messages)

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, range(4)))
    while messages := shared.receive("last", 7):
        received.extend(message.message_id for message in messages)
    shared.close()

    assert len(received) == len(set(received)) == 200


def test_concurrent_create_shares_queue(path, monkeypatch):
    read_tables = database._tables

    def create_meanwhile(db: sqlite3.Connection) -> Any:
        monkeypatch.setattr(database, "_tables", read_tables)
        with SqliteQueue(path, "q") as faster:
            faster.send([b"first"])
        return read_tables(db)

    monkeypatch.setattr(database, "_tables", create_meanwhile)
    with SqliteQueue(path, "q") as slower:
        slower.send([b"second"])
        assert slower.depth().ready == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_opens_own_connection(path, monkeypatch):
    parent = SqliteQueue(path, "q")
    parent.send([b"before"])
    connect = mock.Mock(wraps=sqlite3.connect)
    monkeypatch.setattr(sqlite3, "connect", connect)

    def send():
        parent.send([b"child"])
        connect.assert_called_once()

    child = multiprocessing.get_context("fork").Process(target=send)
    child.start()
    child.join()

    assert child.exitcode == 0
    parent.send([b"after"])
    connect.assert_not_called()
    assert [m.data for m in parent.receive("g", 10)] == [b"before", b"child", b"after"]
    parent.close()


def test_replaced_file_is_reopened(flights, path):
    flights.send([b"lost with its file"])
    for file in path.parent.iterdir():
        file.unlink()

    assert flights.depth().ready == 0
    flights.send([b"new"])

    with SqliteQueue(path, "flights") as other:
        assert [message.data for message in other.receive("g", 5)] == [b"new"]


def test_metadata_is_plain_json_per_message(flights):
    flights.send([b"a", b"b"])
    one, two = flights.receive("g", 2)

    assert type(one.metadata) is dict
    assert one.metadata is not two.metadata
    assert json.loads(json.dumps(one.metadata)) == one.metadata
