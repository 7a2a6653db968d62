"""The ids of one generation's messages, and the memory that keeps them distinct."""

from __future__ import annotations

import tracemalloc

from airflow_broadway.producers.rabbitmq import journal as journal_module
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.journal import QueueJournal, Turns
from airflow_broadway.producers.rabbitmq.receive import intake
from airflow_broadway.producers.rabbitmq.receive.intake import Ids


def load(*message_ids: str) -> list[Held]:
    return [Held(key, 1, False, b"", b"", b"") for key in message_ids]


def test_repeated_id_names_two_messages():
    ids = Ids("own")

    names = [ids.fresh(), *(ids.marked("a", number, "t", ()) for number in range(3))]
    names += [ids.marked(f"{key}", 1, "t", ()) for key in (f"{names[1]}~{names[0]}", names[0])]

    assert names[:2] == ["own-1", "a"]
    assert len(set(names)) == 6


def test_message_published_by_two_turns_keeps_id():
    ids = Ids("own")

    assert ids.marked("a", 1, "t1", {"t1", "t2"}) == "a"
    assert ids.marked("a", 1, "t2", {"t1", "t2"}) is None
    assert ids.marked("a", 1, "t2", {"t1", "t2"}) not in ("a", None)  # a copy of one of them


def test_unsecured_message_keeps_id_on_redelivery():
    ids = Ids("own")
    assert [ids.marked("a", 1, "t", ()), ids.marked("b", 1, "t", ())] == ["a", "b"]
    ids.secured([load("a")])

    ids.reconnect()

    assert ids.marked("b", 1, "t", ()) == "b"
    assert ids.marked("a", 1, "t", ()) != "a"


def test_ids_stay_distinct_beyond_memory_limit(monkeypatch):
    monkeypatch.setattr(intake, "_MAX_REMEMBERED", 100)
    ids = Ids("own")
    tracemalloc.start()
    try:
        names = {ids.marked(f"m{n % 600}", n, "t" * (n % 9), ()) for n in range(2_000)}
        distinct = len(names)
        names.clear()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert distinct == 2_000
    assert size < 100_000


def test_turns_of_few_generations_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_KEPT_GENERATIONS", 3)
    journal = QueueJournal(f"file://{tmp_path}", "q")
    name, _ = journal.note_turn("g0", whole=True)
    turns = Turns(journal)
    assert turns.of("g0") is None

    for number in range(4):
        turns.read(f"g{number}")

    assert turns.of("g0") is None
    assert turns.of("g3") == frozenset()
    turns.read("g0")
    assert turns.of("g0") == frozenset({name})
