from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.errors import LeaseLapsed, StagingError
from airflow_broadway.core.formats import paths
from airflow_broadway.runs.account import keep_report
from airflow_broadway.staging.run_folder import iter_open, iter_unsettled
from airflow_broadway.staging.settling.journal import record_settled
from airflow_broadway.staging.settling.settlement import settle_generation
from airflow_broadway.testing import ManualClock
from tests.unit.staging.kit import FakeCustodian, lease_of, manifest_of, open_generation, open_run


def test_generation_is_recorded_before_receiving(tmp_path):
    run = open_run(tmp_path)
    record = open_generation(run, map_index=1, try_number=2)

    # A second process sees all of it
    [generation] = open_run(tmp_path).generations()
    assert generation == record
    assert (generation.state, generation.map_index, generation.try_number) == ("open", 1, 2)
    assert run.lease(record.generation) == lease_of(record.generation)


def test_generation_is_opened_once(tmp_path):
    run = open_run(tmp_path)
    lease = lease_of("a" * 32)
    run.open_generation(task_id="process", map_index=0, try_number=1, lease=lease)
    with pytest.raises(StagingError, match="was opened before"):
        run.open_generation(task_id="process", map_index=0, try_number=1, lease=lease)


def test_newest_generation_of_a_task_is_last_on_any_clock(tmp_path):
    # Given a retry on a host whose clock is an hour behind
    clock = ManualClock()
    clock.advance(3600)
    open_generation(open_run(tmp_path, clock=clock))
    newer = open_generation(open_run(tmp_path, clock=ManualClock()), try_number=2)
    other = open_generation(open_run(tmp_path), map_index=1)

    run = open_run(tmp_path)
    assert run.generations(["process"])[1:] == [newer, other]
    assert [generation.map_index for generation in run.generations(["process"])] == [0, 0, 1]
    assert run.generations(["other"]) == []


def test_generation_goes_from_open_to_published_to_settled(tmp_path):
    run = open_run(tmp_path)
    record = open_generation(run)
    generation = record.generation
    states = [run.state(generation)]
    assert run.manifest(generation) is None
    run.publish(manifest_of(run, generation, 0))
    states.append(run.state(generation))
    run.files.create(paths.intent(generation), "{}")
    states.append(run.state(generation))
    record_settled(run, record, SettleReport())
    states.append(run.state(generation))
    assert states == ["open", "published", "settling", "settled"]


def test_manifest_is_published_once(tmp_path):
    run = open_run(tmp_path)
    generation = open_generation(run).generation
    assert run.publish(manifest_of(run, generation, 1))
    assert not run.publish(manifest_of(run, generation, 2))
    manifest = run.manifest(generation)
    assert manifest is not None
    assert manifest.received == 1


def test_released_execution_publishes_nothing(tmp_path):
    # Given a zombie whose retry has released its generation
    run = open_run(tmp_path)
    record = open_generation(run)
    custodian = FakeCustodian({record.generation: ["a"]})
    settle_generation(run, record, custodian, Settlement(rest=RELEASE))

    # When it comes to publish
    with pytest.raises(LeaseLapsed, match="released its messages"):
        run.publish(manifest_of(run, record.generation, 1))
    assert run.manifest(record.generation) is None


def test_manifest_of_another_root_is_refused(tmp_path):
    run = open_run(tmp_path)
    generation = open_generation(run).generation
    manifest = manifest_of(run, generation, 1)
    foreign = dataclasses.replace(manifest, root_id="other", host="elsewhere")
    run.files.create(paths.manifest(generation), foreign.dumps())
    with pytest.raises(StagingError, match="'elsewhere'"):
        run.manifest(generation)


def test_record_of_a_newer_release_is_refused(tmp_path):
    run = open_run(tmp_path)
    record = open_generation(run)
    value = {**json.loads(record.dumps()), "version": 99}
    run.files.replace(paths.generation(record.generation), json.dumps(value))
    with pytest.raises(StagingError, match="format version 99"):
        open_run(tmp_path).generation(record.generation)


def test_renewed_lease_counts(tmp_path):
    run = open_run(tmp_path)
    generation = open_generation(run).generation
    assert run.lease(generation).seconds == 900
    for seconds in (2000, 3000):
        run.put_lease(lease_of(generation, seconds=seconds))
        assert run.lease(generation).seconds == seconds


def test_sweep_finds_unsettled_generations_of_all_runs(tmp_path):
    # Given runs that are open, published and settled
    first, second, third = (open_run(tmp_path, f"run:{number}") for number in range(3))
    opened = open_generation(first)
    published = open_generation(second)
    second.publish(manifest_of(second, published.generation, 0))
    settled = open_generation(third)
    record_settled(third, settled, SettleReport())

    # When another process looks
    unsettled = list(iter_unsettled(open_run(tmp_path).store, "Pipeline", "dag"))

    # Then it lists unsettled generations with their runs
    assert {(run.run_id, record.generation, record.state) for run, record in unsettled} == {
        ("run:0", opened.generation, "open"),
        ("run:1", published.generation, "published"),
    }


def test_settled_generation_stays_listed_until_its_run_is_accounted_for(tmp_path):
    run = open_run(tmp_path)
    record = open_generation(run)
    record_settled(run, record, SettleReport())

    assert list(iter_unsettled(run.store, "Pipeline", "dag")) == []
    [(staged, open_still)] = iter_open(run.store, "Pipeline", "dag")
    assert (staged.run_id, open_still.state) == (run.run_id, "settled")

    run.forget_open(record.generation)
    assert list(iter_open(run.store, "Pipeline", "dag")) == []


def test_half_opened_generation_is_released_by_a_sweep(tmp_path):
    # Given a process that died after the first of its two records
    run = open_run(tmp_path)
    record = open_generation(run)
    run.files.remove(paths.generation(record.generation))

    # When a sweep settles what it finds
    [(staged, swept)] = iter_unsettled(run.store, "Pipeline", "dag")
    custodian = FakeCustodian({record.generation: []})
    settle_generation(staged, swept, custodian, Settlement(rest=RELEASE))

    # Then nothing is left to find
    assert list(iter_unsettled(run.store, "Pipeline", "dag")) == []


def test_sweep_costs_the_same_with_many_old_runs(tmp_path, monkeypatch):
    run = open_run(tmp_path, "now")
    open_generation(run)
    for number in range(500):
        (tmp_path / "Pipeline" / "dag" / f"old-{number}" / "generations").mkdir(parents=True)
    looked: list[str] = []
    listing = run.store.backend.list

    def look(path, until=None):
        looked.append(path)
        return listing(path, until)

    monkeypatch.setattr(run.store.backend, "list", look)

    assert len(list(iter_unsettled(run.store, "Pipeline", "dag"))) == 1
    assert len(looked) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 99}'])
def test_unreadable_record_does_not_block_other_runs(tmp_path, caplog, text):
    # Given two unsettled generations, of which one's record is damaged, or of a newer release
    run = open_run(tmp_path)
    broken, whole = open_generation(run), open_generation(run, map_index=1)
    run.dag.replace(f"_open/{broken.generation}.json", text)

    unsettled = list(iter_unsettled(run.store, run.pipeline, run.dag_id))

    assert [record.generation for _, record in unsettled] == [whole.generation]
    assert broken.generation in caplog.text


def test_report_unlists_only_settled_generations(tmp_path):
    # Given a run of two executions, of which one is still open
    run = open_run(tmp_path)
    settled, still_open = open_generation(run), open_generation(run, map_index=1)
    record_settled(run, settled, SettleReport())

    nothing: dict[str, Any] = {"batchers": {}, "reasons": [], "failed_tasks": []}
    report = keep_report(run, run.generations(), **nothing, at=run.clock.now())

    # Then a sweep still finds the open one
    reported = [generation["generation"] for generation in report["generations"]]
    assert reported == [settled.generation, still_open.generation]
    listed = [record.generation for _, record in iter_open(run.store, "Pipeline", "dag")]
    assert listed == [still_open.generation]
