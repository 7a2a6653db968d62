from __future__ import annotations

import dataclasses
import json
from pathlib import Path

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


def test_a_generation_is_on_record_before_anything_is_received(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    record = open_generation(run, map_index=1, try_number=2)

    # A second process sees all of it
    [found] = open_run(tmp_path).generations()
    assert found == record
    assert (found.state, found.map_index, found.try_number) == ("open", 1, 2)
    assert run.lease(record.generation) == lease_of(record.generation)


def test_a_generation_is_opened_once(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    lease = lease_of("a" * 32)
    run.open_generation(task_id="process", map_index=0, try_number=1, lease=lease)
    with pytest.raises(StagingError, match="was opened before"):
        run.open_generation(task_id="process", map_index=0, try_number=1, lease=lease)


def test_the_newest_generation_of_a_task_comes_last_whatever_the_clocks_say(tmp_path: Path) -> None:
    # Given a retry on a host whose clock is an hour behind
    clock = ManualClock()
    clock.advance(3600)
    open_generation(open_run(tmp_path, clock=clock))
    newer = open_generation(open_run(tmp_path, clock=ManualClock()), try_number=2)
    other = open_generation(open_run(tmp_path), map_index=1)

    run = open_run(tmp_path)
    assert run.generations(["process"])[1:] == [newer, other]
    assert [each.map_index for each in run.generations(["process"])] == [0, 0, 1]
    assert run.generations(["other"]) == []


def test_a_generation_goes_from_open_to_published_to_settled(tmp_path: Path) -> None:
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


def test_a_manifest_is_published_once(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    generation = open_generation(run).generation
    assert run.publish(manifest_of(run, generation, 1))
    assert not run.publish(manifest_of(run, generation, 2))
    manifest = run.manifest(generation)
    assert manifest is not None
    assert manifest.received == 1


def test_an_execution_whose_messages_were_given_back_publishes_nothing(tmp_path: Path) -> None:
    # Given a zombie whose retry has released its generation
    run = open_run(tmp_path)
    record = open_generation(run)
    settle_generation(
        run, record, FakeCustodian({record.generation: ["a"]}), Settlement(rest=RELEASE)
    )

    # When it comes to publish
    with pytest.raises(LeaseLapsed, match="released its messages"):
        run.publish(manifest_of(run, record.generation, 1))
    assert run.manifest(record.generation) is None


def test_a_manifest_of_another_root_is_refused(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    generation = open_generation(run).generation
    manifest = manifest_of(run, generation, 1)
    foreign = dataclasses.replace(manifest, root_id="other", host="elsewhere")
    run.files.create(paths.manifest(generation), foreign.dumps())
    with pytest.raises(StagingError, match="'elsewhere'"):
        run.manifest(generation)


def test_a_record_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    record = open_generation(run)
    value = {**json.loads(record.dumps()), "version": 99}
    run.files.replace(paths.generation(record.generation), json.dumps(value))
    with pytest.raises(StagingError, match="format version 99"):
        run.generation(record.generation)


def test_a_renewed_lease_is_the_one_that_counts(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    generation = open_generation(run).generation
    assert run.lease(generation).seconds == 900
    run.put_lease(lease_of(generation, seconds=2000))
    assert run.lease(generation).seconds == 2000


def test_a_sweep_finds_what_is_unsettled_in_all_runs_of_the_dag(tmp_path: Path) -> None:
    # Given runs that are open, published and settled
    first, second, third = (open_run(tmp_path, f"run:{number}") for number in range(3))
    opened = open_generation(first)
    published = open_generation(second)
    second.publish(manifest_of(second, published.generation, 0))
    settled = open_generation(third)
    record_settled(third, settled, SettleReport())

    # When another process looks
    found = list(iter_unsettled(open_run(tmp_path).store, "Pipeline", "dag"))

    # Then it sees those that are not settled, each with its run
    assert {(run.run_id, record.generation, record.state) for run, record in found} == {
        ("run:0", opened.generation, "open"),
        ("run:1", published.generation, "published"),
    }


def test_what_is_settled_stays_on_the_list_until_its_run_is_accounted_for(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    record = open_generation(run)
    record_settled(run, record, SettleReport())

    assert list(iter_unsettled(run.store, "Pipeline", "dag")) == []
    [(found, open_still)] = iter_open(run.store, "Pipeline", "dag")
    assert (found.run_id, open_still.state) == (run.run_id, "settled")

    run.forget_open(record.generation)
    assert list(iter_open(run.store, "Pipeline", "dag")) == []


def test_who_dies_while_opening_leaves_a_generation_that_a_sweep_releases(tmp_path: Path) -> None:
    # Given a process that died after the first of its two records
    run = open_run(tmp_path)
    record = open_generation(run)
    run.files.remove(paths.generation(record.generation))

    # When a sweep settles what it finds
    [(found, swept)] = iter_unsettled(run.store, "Pipeline", "dag")
    custodian = FakeCustodian({record.generation: []})
    settle_generation(found, swept, custodian, Settlement(rest=RELEASE))

    # Then nothing is left to find
    assert list(iter_unsettled(run.store, "Pipeline", "dag")) == []


def test_ten_thousand_old_runs_cost_a_sweep_no_more_than_ten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(tmp_path, "now")
    open_generation(run)
    for number in range(500):
        (tmp_path / "Pipeline" / "dag" / f"old-{number}" / "generations").mkdir(parents=True)
    looked: list[str] = []
    listing = run.store.backend.list

    def look(path: str) -> list[str]:
        looked.append(path)
        return listing(path)

    monkeypatch.setattr(run.store.backend, "list", look)

    assert len(list(iter_unsettled(run.store, "Pipeline", "dag"))) == 1
    assert len(looked) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 99}'])
def test_a_record_that_cannot_be_read_is_in_no_other_runs_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    # Given two unsettled generations, of which one's record is damaged, or of a newer release
    run = open_run(tmp_path)
    broken, whole = open_generation(run), open_generation(run, map_index=1)
    run.dag.replace(f"_open/{broken.generation}.json", text)

    found = list(iter_unsettled(run.store, run.pipeline, run.dag_id))

    assert [record.generation for _, record in found] == [whole.generation]
    assert broken.generation in caplog.text


def test_a_report_takes_only_what_is_settled_from_the_list(tmp_path: Path) -> None:
    # Given a run of two executions, of which one is still open
    run = open_run(tmp_path)
    settled, still_open = open_generation(run), open_generation(run, map_index=1)
    record_settled(run, settled, SettleReport())

    report = keep_report(
        run, run.generations(), batchers={}, reasons=[], failed_tasks=[], at=run.clock.now()
    )

    # Then a sweep still finds the open one
    assert [each["generation"] for each in report["generations"]] == [
        settled.generation,
        still_open.generation,
    ]
    found = [each.generation for _, each in iter_open(run.store, "Pipeline", "dag")]
    assert found == [still_open.generation]
