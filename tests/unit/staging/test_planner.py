"""The plan of a batcher: which is written, and which is used."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.staging import planner as planner_module
from airflow_broadway.staging.batch_reader import BatchReader
from airflow_broadway.staging.settling.journal import record_settled
from tests.unit.staging.kit import (
    message,
    open_generation,
    open_run,
    pipeline_of,
    plan_of,
    publish,
    python_pipeline,
    record_outcome,
    stream,
)


def test_too_many_spark_batches_are_noted_with_the_cure(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(planner_module, "MANY_BATCHES", 3)
    run, pipeline = open_run(tmp_path), pipeline_of(b=Batcher(batch_size=1))
    few, _ = plan_of(run, pipeline, publish(run, pipeline, [stream(3)]))
    assert few.notes == []
    run = open_run(tmp_path, "more")
    plan, _ = plan_of(run, pipeline, publish(run, pipeline, [stream(4)]))
    [note] = plan.notes
    assert "4 Spark batches of 1 message each are more than 3" in note
    assert "merge_keys=True" in note
    assert note in caplog.text
    assert BatchPlan.read(run.files, plan.path)[0].notes == [note]


@pytest.mark.parametrize("handled", [0, 1])
def test_plan_stands_though_the_options_have_changed(tmp_path, handled):
    # Given a plan in batches of 3, of which a callback may have seen some before it was killed
    run, pipeline = open_run(tmp_path), python_pipeline()
    generation = publish(run, pipeline, [stream(7)])
    plan, batches = plan_of(run, pipeline, generation)
    for batch in batches[:handled]:
        record_outcome(run, plan, batch)

    # When the batcher is cleared after batch_size was changed
    again, _ = plan_of(run, python_pipeline(batch_size=5), generation)

    # Then the batches, and their ids, are those that a sink may have seen
    assert again == plan


def test_batch_id_depends_on_messages_key_and_batcher(tmp_path):
    def batch_id(run_id, names, key="k", batcher="b"):
        run = open_run(tmp_path, run_id)
        options = Batcher(engine="python", batch_timeout=None, batch_size=3)
        pipeline = pipeline_of(None, **{batcher: options})
        messages = [
            message(n, message_id=name, batcher=batcher, batch_key=key)
            for n, name in enumerate(names)
        ]
        _, [batch] = plan_of(run, pipeline, publish(run, pipeline, [messages]), batcher=batcher)
        return batch.batch_id

    first = batch_id("one", "abc")
    assert batch_id("the same in a later run", "abc") == first
    others = [
        batch_id("one of them", "ab"),
        batch_id("with another", "abd"),
        batch_id("in another order", "acb"),
        batch_id("of another key", "abc", key="l"),
        batch_id("of another batcher", "abc", batcher="c"),
    ]
    assert len({first, *others}) == 6


def test_unfinished_try_is_ignored(tmp_path):
    run, pipeline = open_run(tmp_path), python_pipeline()
    generation = publish(run, pipeline, [stream(7)])
    plan, batches = plan_of(run, pipeline, generation)
    folder = plan.path.rpartition("/")[0]
    run.files.write_lines(f"{folder}/99-killed/data-00000.parquet", ["half"])
    record_outcome(run, plan, batches[0])
    assert plan_of(run, pipeline, generation)[0] == plan


def test_released_generation_is_left_out_and_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    run, pipeline = open_run(tmp_path), python_pipeline()
    kept = publish(run, pipeline, [stream(2)])
    void = publish(run, pipeline, [stream(2)], map_index=1)
    record_settled(run, run.generation(void), SettleReport(released=2))
    unpublished = open_generation(run, map_index=2).generation

    plan, _ = plan_of(run, pipeline, kept, void, unpublished)

    assert plan.generations == [kept]
    assert f"generation {void} is left out, for it is settled or released" in caplog.text
    assert f"generation {unpublished} is left out, for it is not published" in caplog.text


def test_nothing_to_plan_is_an_empty_plan(tmp_path):
    run, pipeline = open_run(tmp_path), python_pipeline()
    plan, batches = plan_of(run, pipeline)
    assert (plan.messages, plan.batches, plan.data, batches) == (0, 0, [], [])


def test_missing_message_file_is_an_error_and_no_plan(tmp_path):
    run, pipeline = open_run(tmp_path), python_pipeline()
    generation = publish(run, pipeline, [stream(2)])
    manifest = run.manifest(generation)
    assert manifest is not None
    more = dataclasses.replace(manifest, batchers={"b": 3})
    run.files.replace(f"{generation}/manifest.json", more.dumps())
    with pytest.raises(StagingError, match="name 3 messages, but their files hold 2"):
        plan_of(open_run(tmp_path), pipeline, generation)
    assert [*Path(run.files.full("")).rglob("plan.jsonl")] == []


def test_replanned_messages_are_marked_redelivered(tmp_path):
    # Given a plan of two producers' messages, whose batches may have been handled
    run, pipeline = open_run(tmp_path), python_pipeline(batch_size=2)
    kept = publish(run, pipeline, [stream(3)])
    gone = publish(run, pipeline, [stream(3, 3)], map_index=1)
    plan_of(run, pipeline, kept, gone)

    # When the second's process task is cleared, and receives anew
    anew = publish(run, pipeline, [stream(3, 6)], map_index=1)
    plan, batches = plan_of(run, pipeline, kept, anew)

    # Then the first's come in other batches, and say so; the new ones do not
    with BatchReader(run, plan) as reader:
        rows = [row for batch in batches for row in reader.read(batch)]
    marks = {row.message_id: row.redelivered for row in rows}
    assert marks == {f"m-{n}": n < 3 for n in (0, 1, 2, 6, 7, 8)}
    assert sum(batch.redelivered for batch in batches) == 3
    # And so they do however often the plan is written
    assert [b.redelivered for b in plan_of(run, pipeline, kept, anew)[1]] == [
        b.redelivered for b in batches
    ]
