"""Reads of a settlement: each file once, many at a time; leases are renewed meanwhile; and what is
damaged settles nothing.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Message
from airflow_broadway.core.custody.run_summary import lines_of
from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats import record_batch as recording
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.producers.sqlite.queue import SqliteQueue
from airflow_broadway.staging import plan_choice as plans
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Folder
from tests.unit.runs.steps import Run, Sums, balanced

COUNT = 120
BATCHES = 11
DEAD = [n for n in range(COUNT) if n % 7 == 0 or n % 5 == 0]


def done(folder: Path) -> Run:
    """A run of three process tasks, whose batches are done."""
    run = Run(folder, numbers=range(COUNT))
    run.batch(*(run.process(index, max_messages=40) for index in range(3)))
    return run


def forget_copies(run: Run) -> None:
    """As if the batcher's task had died before it gathered its outcomes."""
    for path in run.folder.rglob("gathered-*.jsonl"):
        path.unlink()


@pytest.fixture
def run(tmp_path):
    return done(tmp_path)


class Requests(Counter[str]):
    """Requests to the store, by kind and name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        for kind in ("read", "list", "lines", "exists"):
            self._count(monkeypatch, kind)

    def _count(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        real = getattr(Folder, kind)

        def counted(folder: Folder, path: str) -> Any:
            self[f"{kind} {path}"] += 1
            return real(folder, path)

        monkeypatch.setattr(Folder, kind, counted)

    def of(self, part: str) -> list[int]:
        return [count for request, count in self.items() if part in request]


def test_settling_reads_each_outcome_and_entry_file_once(tmp_path, monkeypatch):
    # Given exceptions in files of their own, and no copies of outcomes
    monkeypatch.setattr(recording, "INLINE_BYTES", 0)
    run = done(tmp_path)
    forget_copies(run)
    reads = Requests(monkeypatch)

    report = run.ack()

    # Then, with three generations and a report, each was read once
    assert balanced(report)["received"] == COUNT
    files = len(list(run.folder.rglob("*.entries.jsonl")))
    assert reads.of(".entries.jsonl") == [1] * files
    assert files > 1
    outcomes = [reads[name] for name in reads if "outcomes/" in name and name.endswith(".json")]
    assert outcomes == [1] * BATCHES
    assert reads.of("plan.jsonl") == [1]
    assert [reads[name] for name in reads if name.startswith("list outcomes/")] == [1]


def test_settling_reads_small_batches_together(run, monkeypatch):
    reads = Requests(monkeypatch)

    report = run.ack()

    # Then the copies of all outcomes were read, with the entries in them, and nothing else
    assert balanced(report)["received"] == COUNT
    assert not list(run.folder.rglob("*.entries.jsonl"))
    [gathered] = run.folder.rglob("gathered-*.jsonl")
    assert [name.partition(" ")[0] for name in reads if "outcomes/" in name] == ["list", "read"]
    assert reads.of(gathered.name) == [1]
    assert run.dead() == DEAD


@pytest.mark.parametrize("harm", ["gone", "short", "other"])
def test_incomplete_copies_decide_nothing(run, harm):
    [gathered] = run.folder.rglob("gathered-*.jsonl")
    text = gathered.read_text()
    if harm == "gone":
        gathered.unlink()
    elif harm == "short":  # as an upload that a store has cut
        gathered.write_text(text[: len(text) // 2])
    else:  # the failures are successes, says somebody who cannot seal it
        gathered.write_text(text.replace("dead_letter", "ack"))
    assert run.ack()["balanced"]
    assert run.dead() == DEAD
    assert run.depth()[:3] == (0, 0, 0)


def test_copy_alone_is_no_outcome(run):
    # Given a batch whose outcome is gone, and only its copy is left
    path = max(run.folder.rglob("outcomes/default/*/*.json"), key=lambda file: file.stat().st_size)
    outcome = Outcome.loads(path.read_text(), path.name)
    path.unlink()

    report = run.ack()

    # Then its messages are released
    assert balanced(report)["released"] == outcome.successful + outcome.failed > 0
    assert run.depth()[0] == report["totals"]["released"]


def test_exceptions_beyond_memory_are_read_from_outcomes(run, monkeypatch):
    monkeypatch.setattr(plans, "KEPT_BYTES", 0)
    assert balanced(run.ack())["dead_lettered"] == len(DEAD)
    assert run.dead() == DEAD


def test_outcomes_are_read_concurrently(run, monkeypatch):
    # Given reads that end only when another is under way
    forget_copies(run)
    pairs = threading.Barrier(2, timeout=20)
    read = Folder.read

    def slow(folder, path):
        if path.startswith("outcomes/") and path.endswith(".json"):
            seen.append(path)
            if len(seen) <= BATCHES - BATCHES % 2:
                pairs.wait()
        return read(folder, path)

    seen: list[str] = []
    monkeypatch.setattr(Folder, "read", slow)
    assert balanced(run.ack())
    assert len(seen) == BATCHES


def test_leases_are_renewed_while_outcomes_are_read(run, monkeypatch):
    # Given a lease of a second, and reads that last until it has been renewed
    renewed = threading.Event()
    renew, read, lease_of = SqliteQueue.renew, Folder.read, StagedRun.lease
    generations: list[str] = []

    def noted(queue, *args, **kwargs):
        generations.append(str(args))
        renewed.set()
        return renew(queue, *args, **kwargs)

    def slow(folder, path):
        if path.startswith("outcomes/"):
            assert renewed.wait(20)
        return read(folder, path)

    def short(staged, generation):
        return dataclasses.replace(lease_of(staged, generation), seconds=1.0)

    monkeypatch.setattr(SqliteQueue, "renew", noted)
    monkeypatch.setattr(Folder, "read", slow)
    monkeypatch.setattr(StagedRun, "lease", short)

    report = run.ack()

    assert balanced(report)["lapsed"] == 0
    assert generations


# ----------------------------------------------------------------------------------------- damage


def shorten(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize(
    "kind", ["failed-*.jsonl", "*.entries.jsonl", "outcomes/*/*/*.json", "manifest.json"]
)
def test_damage_settles_nothing_and_next_run_receives_all(tmp_path, monkeypatch, kind):
    # Given a run of one generation whose failures have lost a line
    if "entries" in kind:
        monkeypatch.setattr(recording, "INLINE_BYTES", 0)
    run = Run(tmp_path, numbers=range(40))
    run.batch(run.process())
    path = max(run.folder.rglob(kind), key=lambda file: file.stat().st_size)
    if kind == "manifest.json":
        path.write_text(path.read_text().replace('"received": 40', '"received": 39'))
    elif "outcomes" in kind:
        forget_copies(run)
        damaged = re.sub(r'"lines": \[".*?}", ', '"lines": [', path.read_text())
        assert damaged != path.read_text()
        path.write_text(damaged)
    else:
        shorten(path)

    # When it is settled, then nothing is, and the error names the file
    with pytest.raises(StagingDamaged, match=path.name.replace(".", r"\.")):
        Run(tmp_path).ack()
    assert run.depth() == (0, 0, 40, 0)
    assert not list(run.folder.rglob("journal-intent.json"))

    # And the next run, once this one has failed, receives all of it, marked
    later = run.next()
    assert balanced(later.all())["received"] == 40
    assert run.dead() == [n for n in range(40) if n % 7 == 0 or n % 5 == 0]
    assert run.depth()[:3] == (0, 0, 0)
    again = [call for call in later.calls() if call.redelivered]
    assert len(again) == len([n for n in range(40) if n % 7])


def test_damage_of_one_generation_does_not_block_others(run):
    shorten(min(run.folder.rglob("failed-*.jsonl")))
    with pytest.raises(StagingDamaged):
        run.ack()
    assert len(list(run.folder.rglob("journal-settled.json"))) == 2
    assert run.depth()[2] == 40


def test_restored_file_is_settled_when_ack_is_cleared(run):
    path = next(run.folder.rglob("failed-*.jsonl"))
    whole = path.read_bytes()
    shorten(path)
    with pytest.raises(StagingDamaged):
        run.ack()
    path.write_bytes(whole)
    assert balanced(run.ack())["received"] == COUNT
    assert run.depth()[:3] == (0, 0, 0)


# ----------------------------------------------------------------------------------------- report


def test_report_counts_failures_of_both_stages_with_reasons(run):
    report = run.ack()

    sevens = len([n for n in range(COUNT) if n % 7 == 0])
    fives = len([n for n in range(COUNT) if n % 5 == 0 and n % 7])
    assert report["totals"]["failed"] == sevens + fives
    assert [tuple(reason.values()) for reason in report["reasons"]] == [
        (fives, "batch", "five", {"dead_lettered": fives}),
        (sevens, "process", "seven", {"dead_lettered": sevens}),
    ]
    lines = lines_of(report)
    assert lines[0].startswith(f"{COUNT} messages received: ")
    where = f"{sevens} before any batch, {fives} in batches of default"
    assert lines[1] == f"{sevens + fives} failed: {where}."

    # And a second read has the same result
    assert run.ack()["reasons"] == report["reasons"]


#: Reasons that differ in a number only are one.
_LETTERS = "abcdefghijklm"


class Varied(Sums):
    """Each number is its own reason."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.failed(f"reason {_LETTERS[int(message.data)]}")


@pytest.mark.parametrize(
    ("kinds", "others"), [(10, []), (11, ["1 other reason"]), (12, ["2 other reasons"])]
)
def test_report_names_ten_reasons_and_counts_the_others(tmp_path, kinds, others):
    # Given reasons of which the first is the rarest
    run = Run(tmp_path, pipeline=Varied)
    run.send(kind for kind in range(1, kinds + 1) for _ in range(kind))
    run.process()

    reasons = run.ack()["reasons"]

    largest = [f"reason {_LETTERS[kind]}" for kind in range(kinds, kinds - 10, -1)]
    assert [reason["reason"] for reason in reasons] == largest + others
    assert sum(reason["count"] for reason in reasons) == kinds * (kinds + 1) // 2
