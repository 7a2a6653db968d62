"""A run at a glance: backfills, runs in one task, runs that died, batches of which
processes died, tasks that were cleared.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.entries import EntryLine
from airflow_broadway.core.formats.isolation import CRASHED
from airflow_broadway.core.formats.live import LIVE_INTERVAL, LiveCounts, LiveSign, read_live
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.parts import part_id, record_split
from airflow_broadway.core.formats.plan import PlannedBatch
from airflow_broadway.core.model.run_source import ARCHIVE, Interval, RunSource
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.runs.reading import message
from airflow_broadway.runs.reading.batches import page_of_batches
from airflow_broadway.runs.reading.message import ids_with_text
from airflow_broadway.runs.reading.overview import overview_of
from airflow_broadway.runs.reading.payload import MOST_BYTES, payload_of
from airflow_broadway.runs.tasks import UnstagedTask
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.store import Folder
from airflow_broadway.testing.clock import ManualClock
from tests.unit.runs.steps import Point, Run, dies

COUNT = 100
BEFORE_PUBLISHING = Point("airflow_broadway.staging.run_folder:StagedRun.publish", "before")


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, numbers=range(COUNT))


# -- runs that are no ordinary run -----------------------------------------------------------------


def test_backfill_shows_its_source(run):
    day = datetime(2026, 1, 1, tzinfo=UTC)
    source = RunSource(kind=ARCHIVE, interval=Interval(day, day + timedelta(days=1)))
    run.process()
    [record] = run.staged.generations()
    path = f"generations/{record.generation}.json"
    value = {**json.loads(run.staged.files.read(path)), "source": source.to_json()}
    run.staged.files.replace(path, json.dumps(value))

    overview = overview_of(Run(run.folder).staged)

    assert overview.source["kind"] == "archive"
    assert overview.source["interval"] == ["2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"]


def test_unstaged_run_has_totals_and_reasons_but_no_batches(run):
    UnstagedTask(run.staged, run.pipeline, run.task(), run.ports, budget=Budget()).run()

    overview = overview_of(run.staged)

    assert overview.balanced
    assert (overview.totals["acked"], overview.totals["dead_lettered"]) == (68, 32)
    assert {row.reason: row.count for row in overview.reasons or ()} == {"five": 17, "seven": 15}
    assert list(overview.flows) == []
    assert page_of_batches(run.staged).total == 0


def test_empty_run_is_shown_from_its_report(tmp_path):
    run = Run(tmp_path)
    run.process()
    run.ack()

    overview = overview_of(run.staged)

    assert (overview.totals["received"], overview.balanced, overview.settled) == (0, True, True)
    assert list(overview.receipts) == []


def test_execution_without_manifest_is_in_no_total(run):
    dies(run.process, BEFORE_PUBLISHING)

    overview = overview_of(run.staged)

    [receipt] = overview.receipts
    assert (receipt.state, receipt.live, receipt.received, receipt.account) == (
        *("open", True, None),
        None,
    )
    assert (overview.totals["received"], overview.receiving) == (0, None)
    assert not overview.settled


def test_clearing_a_task_outdates_the_report(run):
    run.batch(run.process(max_messages=50))
    run.ack()
    before = overview_of(run.staged)
    run.process(try_number=2)

    after = overview_of(run.staged)

    assert (before.settled, after.settled) == (True, False)
    assert (before.totals["received"], after.totals["received"]) == (50, 100)
    assert after.totals["still_leased"] == 50
    assert after.balanced is None


# -- batches of which processes died ---------------------------------------------------------------


def test_split_batches_show_their_parts_and_crashes(run):
    run.batch(run.process())
    recorded = Recorded(run.staged)
    [plan] = recorded.standing("default")
    batch = recorded.batches(plan)[0]
    folder = run.folder / "staging" / run.staged.path / paths.outcomes(plan.path)
    for path in (*folder.glob("gathered-*"), folder / f"{batch.batch_id}.json"):
        path.unlink()
    halves = [_half(batch, number) for number in (0, 1)]
    files = run.staged.files
    record_split(files, plan.path, "default", batch, halves, "tests")
    crashed = Outcome(
        batch_id=halves[0].batch_id,
        batcher="default",
        plan=plan.path,
        successful=0,
        failed=1,
        error=f"{CRASHED}5 died",
    )
    files.create(paths.outcome(plan.path, crashed.batch_id), crashed.dumps())
    files.create("deaths/tries/batch.default-000001.json", "{}")

    overview = overview_of(run.staged)
    rows = page_of_batches(run.staged).rows

    [flow] = overview.flows
    [isolated] = overview.isolation["batches"]
    assert (isolated["split"], isolated["crashed"], flow.done) == (1, 1, flow.batches - 1)
    assert (overview.isolation["deaths"], overview.isolation["interruptions"]) == (1, 0)
    assert [row.planned.part is not None for row in rows[:2]] == [True, True]
    assert [row.result for row in rows[:2]] == ["crashed", ""]
    assert len(rows) == flow.batches


def _half(batch: PlannedBatch, number: int) -> PlannedBatch:
    value = {**batch.to_json(), "batch_id": part_id(batch.batch_id, number)}
    return PlannedBatch(**{**value, "size": batch.size // 2, "part": [[0, 0], [0, 9]]})


# -- while it goes on ------------------------------------------------------------------------------


def test_live_counts_are_written_every_three_seconds(run, monkeypatch):
    clock = ManualClock()
    folder = run.staged.files
    sign = LiveSign(folder, "g", clock)
    written: list[str] = []
    real = Folder.replace

    def noted(folder, path, text):
        written.append(path)
        real(folder, path, text)

    monkeypatch.setattr(Folder, "replace", noted)
    counts = LiveCounts(
        at=clock.now(),
        received=7,
        received_bytes=70,
        failed=1,
        batchers={"default": 6},
        deadline=clock.now() + timedelta(minutes=5),
    )

    for _ in range(4):
        sign.leave(lambda: counts)
        clock.advance(LIVE_INTERVAL / 2)

    assert written == ["g/live.json"]
    assert read_live(folder, "g") == counts
    assert read_live(folder, "other") is None


def test_process_task_writes_live_counts(run, monkeypatch):
    # Given that it is always time to
    monkeypatch.setattr("airflow_broadway.core.formats.live.LIVE_INTERVAL", 0.0)

    dies(run.process, BEFORE_PUBLISHING)

    [receipt] = overview_of(run.staged).receipts
    assert (receipt.received, receipt.failed, receipt.batchers) == (COUNT, 15, {"default": 85})
    assert receipt.lease is not None
    assert receipt.lease.by_task
    assert receipt.lease.remaining > 600


def test_damaged_or_newer_live_counts_are_ignored(run):
    for text in ("{", "[]", '{"version": 2}', '{"version": 1}'):
        run.staged.files.replace("g/live.json", text)

        assert read_live(run.staged.files, "g") is None


# -- metadata --------------------------------------------------------------------------------------


def _place(message_id: str) -> int:
    return int(message_id.rpartition("-")[2])


def test_text_search_finds_staged_messages(run):
    run.process()

    [one] = ids_with_text(run.staged, "83").ids
    many = ids_with_text(run.staged, "1")

    first, place = min(map(_place, ids_with_text(run.staged, "0").ids)), _place(one)
    assert place - first == 83 - 10  # the embedded queue counts, and 0 has failed
    assert (len(many.ids), many.whole, many.looked_at) == (16, True, COUNT)


def test_early_failure_shows_payload_of_its_verdict():
    # Of a producer that republishes, and so keeps payloads next to the verdicts
    entry = Entry("id", "", Verdict(Action.DEAD_LETTER, 0.0, "why", "process"), payload=b"98")

    payload = message._payload(None, EntryLine(entry, None, settled=False))

    assert payload is not None
    assert (payload.text, payload.received) == ("98", True)


def test_search_stops_at_its_hit_and_time_limits(run, monkeypatch):
    run.process(max_messages=50)
    run.process(1)
    clock = ManualClock()
    monkeypatch.setattr(message, "MOST_SECONDS", -1.0)
    late = ids_with_text(run.staged, "83", clock=clock)
    monkeypatch.undo()
    monkeypatch.setattr(message, "MOST_HITS", 5)

    enough = ids_with_text(run.staged, "1", clock=clock)

    assert (list(late.ids), late.whole) == ([], False)
    assert late.looked_at < COUNT
    assert (len(enough.ids), enough.whole) == (5, False)


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (b'{"a": 1}', "json", '{\n  "a": 1\n}'),
        (b"plain", "text", "plain"),
        (b"\xff\x00\x01", "hex", "00000000  ff 00 01"),
        (b"a\x00b", "hex", "00000000  61 00 62"),
        ({"n": 1}, "json", '{\n  "n": 1\n}'),
        (None, "json", "null"),
    ],
)
def test_payload_is_json_text_or_hex(value, form, text):
    payload = payload_of(value)

    assert (payload.form, payload.text, payload.cut) == (form, text, False)


@pytest.mark.parametrize("value", [b"x" * 10**6, b"\xff" * 10**6, b"[" * 10**6, {"a": "x" * 10**6}])
def test_large_payload_is_cut(value):
    payload = payload_of(value)

    assert payload.cut
    assert len(payload.text) <= MOST_BYTES
    assert payload.size >= 10**6
