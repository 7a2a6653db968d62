"""Foreign files in the staging folder: left alone, and harmless."""

from __future__ import annotations

from pathlib import Path

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.producers.kit.state_files import StateFiles
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.rate_state import StagedRateState
from airflow_broadway.staging.retention import KEEP, mark_balanced, sweep_retention
from airflow_broadway.staging.run_folder import StagedRun, iter_unsettled
from airflow_broadway.staging.settling.journal import record_settled
from airflow_broadway.staging.settling.settlement import build_settlement
from airflow_broadway.testing import ManualClock
from tests.unit.staging.kit import (
    batches_of,
    message,
    open_generation,
    open_run,
    pipeline_of,
    publish,
    record_outcome,
)

#: What file managers, editors, synchronizers and people leave.
STRAY = (".DS_Store", "._ours.json", "Thumbs.db", "notes.txt", "a copy.json", "x.json~", "zz.json")


def litter(root: Path) -> None:
    """Put strays into every folder below ``root``."""
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        for name in STRAY:
            (folder / name).write_bytes(b"\x00\x01\xff no JSON")


def test_stray_file_among_balanced_marks_stops_no_sweep(tmp_path):
    # Given a balanced run, and files of a file manager next to its mark
    clock = ManualClock()
    run = open_run(tmp_path, clock=clock)
    record_settled(run, open_generation(run), SettleReport(acked=1))
    mark_balanced(run)
    folder = Path(run.dag.full("_balanced"))
    for name in (*STRAY, "20250101T000000-torn.json"):
        (folder / name).write_bytes(b"\x00\x01\xff no JSON")
    clock.advance(KEEP + 1)

    # Then the run is removed, and what is not ours stays
    assert sweep_retention(run.store, "Pipeline", "dag", clock=clock) == [run.run_id]
    left = {path.name for path in folder.iterdir()}
    assert left == {*STRAY, "20250101T000000-torn.json"}


def test_strays_in_every_folder_change_nothing(tmp_path):
    # Given a run with a plan and an outcome, and an unsettled generation
    run = open_run(tmp_path)
    pipeline = pipeline_of(b=Batcher(batch_size=2))
    generation = publish(run, pipeline, [[message(n, batcher="b") for n in range(4)]])
    plan = plan_batches(run, pipeline, "b", [generation], try_label="1")
    record_outcome(run, plan, batches_of(run, plan)[0])
    StagedRateState(run).update(lambda state: {"count": 1})

    litter(tmp_path)

    # Then every listing has only our files
    assert [generation.generation for generation in run.generations()] == [generation]
    [(_, record)] = iter_unsettled(run.store, "Pipeline", "dag")
    assert record.generation == generation
    recorded = Recorded(run)
    assert recorded.standing("b") == recorded.deciding(pipeline.batchers, generation) == [plan]
    assert plan_batches(run, pipeline, "b", [generation], try_label="2") == plan
    _, complete, progress = build_settlement(run, generation, pipeline, [plan], final=False)
    assert (complete, progress.recorded, progress.batches) == (False, 1, 2)
    assert StagedRateState(run).update(lambda state: state) == {"count": 1}  # type: ignore[arg-type, return-value]
    assert sweep_retention(run.store, "Pipeline", "dag", clock=run.clock) == []


def test_strays_do_not_disturb_a_queue_journal(tmp_path):
    journal = QueueJournal(f"file://{tmp_path}", "flights")
    turn, _ = journal.note_turn("g", whole=True)
    journal.log_of("g").note_now({"m1": Action.ACK})
    notes = StateFiles(f"file://{tmp_path}", "x")
    notes.write("y/1.json", {})
    litter(tmp_path)
    assert [name for name in notes.names("y") if name.startswith(".")] == []
    assert notes.names("y/1.json") == []
    assert journal.turns("g") == {turn}
    assert journal.log_of("g").now() == {"m1": Action.ACK}


def test_generation_opens_despite_a_lost_response(tmp_path, monkeypatch):
    # Given a store that writes the record, and a client that retries after a lost response
    run = open_run(tmp_path)
    create = run.files.create

    def twice(path, text):
        create(path, text)
        return create(path, text)

    monkeypatch.setattr(run.files, "create", twice)

    record = open_generation(run)

    assert StagedRun.generations(run) == [record]
