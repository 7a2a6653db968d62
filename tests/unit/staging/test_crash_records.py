"""The generations whose task died, and what was in hand then."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from airflow_broadway.staging.crash_records import (
    KEPT,
    CrashHistory,
    forget_crashes,
    load_crash_history,
    portion_size,
    record_crash,
)
from airflow_broadway.staging.store import Folder, Store
from tests.unit.runs.steps import precede

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def store(tmp_path):
    return Store.open(str(tmp_path))


def test_pipeline_without_crashes_has_an_empty_history(store):
    assert load_crash_history(store, "orders", NOW) == CrashHistory()


def test_messages_in_hand_are_counted_over_crashes(store):
    record_crash(store, "orders", "g1", ["a", "b"], NOW)
    record_crash(store, "orders", "g2", ["a"], NOW + timedelta(seconds=1))
    record_crash(store, "orders", "g3", [], NOW + timedelta(seconds=2))
    record_crash(store, "others", "g4", ["a"], NOW)

    history = load_crash_history(store, "orders", NOW + timedelta(seconds=3))

    assert history == CrashHistory(3, {"a": 2, "b": 1}, {"a": 1})


def test_repeated_record_of_a_crash_counts_once(store):
    record_crash(store, "orders", "g1", ["a"], NOW)
    record_crash(store, "orders", "g1", ["a"], NOW)
    record_crash(store, "orders", "g1", ["a"], NOW + timedelta(seconds=9))

    assert load_crash_history(store, "orders", NOW).in_hand == {"a": 1}


def test_retried_settlement_leaves_one_record(store, tmp_path):
    for number in range(9):
        record_crash(store, "orders", "g1", ["a"], NOW + timedelta(seconds=number))
    assert len([*tmp_path.glob("orders/_crashes/*")]) == 1


def test_several_messages_may_be_alone_in_hand(store):
    record_crash(store, "orders", "g1", ["a", "b", "c"], NOW, alone=["a", "b"])
    record_crash(store, "orders", "g2", ["d"], NOW, alone=[])
    history = load_crash_history(store, "orders", NOW)
    assert (sorted(history.in_hand), history.alone) == (["a", "b", "c", "d"], {"a": 1, "b": 1})


def test_crashes_of_a_dead_lettered_message_are_forgotten(store):
    later = [NOW + timedelta(seconds=number) for number in range(3)]
    record_crash(store, "orders", "g1", ["a", "b"], later[0])
    forget_crashes(store, "orders", "batch-1", ["a"], later[1])
    assert load_crash_history(store, "orders", later[1]) == CrashHistory(1, {"b": 1}, {})

    record_crash(store, "orders", "g2", ["a"], later[2])
    assert load_crash_history(store, "orders", later[2]).in_hand == {"a": 1, "b": 1}
    assert load_crash_history(store, "orders", NOW + 2 * KEPT) == CrashHistory()


def test_late_record_blames_no_dead_lettered_message(store, monkeypatch):
    # Given a process that is stopped as it records a crash
    def settled_by_another(*_, **__):
        record_crash(store, "orders", "g1", ["a"], NOW + timedelta(seconds=1))
        forget_crashes(store, "orders", "g2", ["a"], NOW + timedelta(seconds=2))

    precede(monkeypatch, settled_by_another, Folder, "create", once=True)

    # When another has recorded it, and its message is a dead letter, before it goes on
    record_crash(store, "orders", "g1", ["a"], NOW)

    # Then the crash counts once, and its message begins anew
    history = load_crash_history(store, "orders", NOW + timedelta(seconds=3))
    assert history == CrashHistory(1, {}, {})


def test_record_is_kept_for_fourteen_days(store):
    record_crash(store, "orders", "g1", ["a"], NOW)

    assert load_crash_history(store, "orders", NOW + KEPT).crashes == 1
    assert load_crash_history(store, "orders", NOW + KEPT + timedelta(seconds=1)).crashes == 0
    assert load_crash_history(store, "orders", NOW).crashes == 0  # it was removed


@pytest.mark.parametrize("text", ['{"version": 99, "in_hand": ["a"]}', "", "{}", "[]"])
def test_unreadable_record_still_counts_as_a_crash(store, text, caplog):
    record_crash(store, "orders", "g1", ["a"], NOW)
    folder = store.folder("orders/_crashes")
    [name] = folder.list("")
    folder.replace(name, text)

    assert load_crash_history(store, "orders", NOW) == CrashHistory(1)
    assert "A crash record cannot be read" in caplog.text


def test_record_removed_since_the_listing_hides_no_other(store, monkeypatch):
    for generation in ("g1", "g2", "g3"):
        record_crash(store, "orders", generation, ["a"], NOW)
    gone, *_ = store.folder("orders/_crashes").list("")
    read = Folder.read
    monkeypatch.setattr(
        Folder, "read", lambda self, path: read(self, "gone" if path == gone else path)
    )

    assert load_crash_history(store, "orders", NOW).in_hand == {"a": 2}


@pytest.mark.parametrize(("in_hand", "size"), [(0, None), (1, 25), (2, 5), (3, 1), (7, 1)])
def test_portions_shrink_with_the_crashes_of_a_message(in_hand, size):
    assert portion_size(in_hand) == size
