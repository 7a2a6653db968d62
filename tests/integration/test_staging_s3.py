"""Staging on S3, against a real server over HTTP."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.producers.kit.failures import Failures
from airflow_broadway.producers.kit.state_files import StateFiles
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.retention import mark_balanced, sweep_retention
from airflow_broadway.staging.run_folder import StagedRun, iter_unsettled
from airflow_broadway.staging.settling.settlement import build_settlement, settle_generation
from airflow_broadway.staging.store import Folder, Store
from airflow_broadway.testing import ManualClock
from tests.s3_server import s3_server
from tests.unit.staging.kit import (
    FakeCustodian,
    batches_of,
    manifest_of,
    message,
    open_generation,
    pipeline_of,
    publish,
    read_batch,
    record_outcome,
    stage,
)

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture
def options(server):
    return server.options()


@pytest.fixture
def uri(server):
    return server.root()


def run_on(uri: str, options: dict[str, Any], clock: ManualClock | None = None) -> StagedRun:
    store = Store.open(uri, **options)
    clock = clock or ManualClock()
    return StagedRun(store, pipeline="Pipeline", dag_id="dag", run_id="run:1", clock=clock)


def test_one_of_two_concurrent_writers_creates_the_object(uri, options):
    # Given two clients that have both seen that there is no manifest
    folders: list[Folder] = [Store.open(uri, **options).folder("f") for _ in range(2)]
    assert not any(folder.exists("manifest.json") for folder in folders)

    for attempt in range(10):
        path, start, winners = f"{attempt}.json", threading.Barrier(2), []

        def write(folder: Folder, text: str, path: str = path, start: Any = start) -> None:
            start.wait()
            if folder.create(path, text):
                winners.append(text)  # noqa: B023 - joined below

        # When both write it concurrently
        threads = [
            threading.Thread(target=write, args=(folder, name * 5000))
            for folder, name in zip(folders, "ab", strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        # Then one of them has created it, with its text
        assert len(winners) == 1
        assert folders[0].read(path) == winners[0]


def test_writes_are_visible_to_other_clients_immediately(uri, options):
    first, second = (Store.open(uri, **options).folder("f") for _ in range(2))
    assert second.list("x") == []
    assert not second.exists("x/a")
    first.create("x/a", "1")
    assert second.list("x") == ["a"]
    assert second.exists("x/a")
    first.replace("x/a", "22")
    assert second.read("x/a") == "22"
    assert list(second.lines("x/a")) == ["22"]
    second.remove("x/a")
    assert not first.exists("x/a")
    assert first.list("x") == []


def test_listing_costs_one_request_per_thousand_names(server, uri, options):
    # A Dag with many runs, whose keys are put without the store, for speed
    store = Store.open(uri, **options)
    store.folder("dag/runs/run-0000").create("x/report.json", "1")
    bucket, _, root = uri.removeprefix("s3://").partition("/")
    for number in range(1, 1101):
        key = f"{root}/dag/runs/run-{number:04d}/report.json"
        store.fs.call_s3("put_object", Bucket=bucket, Key=key, Body=b"1")
    store.folder("dag/runs").create(".hidden", "1")

    # A folder that does not exist is one request, and its parent is not listed
    run = Store.open(uri, **options).folder("dag/runs/run-0001")
    with server.counted() as requests:
        assert run.list("deaths") == []
    assert requests.of("LIST") == requests.total() == 1

    # A folder of folders and files has its names, without hidden ones
    folder = Store.open(uri, **options).folder("dag")
    with server.counted() as requests:
        assert folder.list("runs") == [f"run-{number:04d}" for number in range(1101)]
    assert requests.of("LIST") == requests.total() == 2
    assert folder.list("runs/run-0000") == ["x"]
    assert folder.list("runs/run-0000/x") == ["report.json"]
    assert folder.list("runs/run-0000/x/report.json") == []
    assert folder.list("runs/run-000") == []


def test_lines_are_uploaded_in_parts_and_an_abort_leaves_no_object(uri, options):
    folder = Store.open(uri, **options).folder("f")
    lines = [str(number) * 1000 for number in range(10_000, 14_000)]  # several parts
    assert folder.write_lines("big.jsonl", iter(lines)) == len(lines)
    assert list(folder.lines("big.jsonl")) == lines

    def broken() -> Iterator[str]:
        yield from lines
        raise RuntimeError("halfway")

    with pytest.raises(StagingError, match="halfway"):
        folder.write_lines("half.jsonl", broken())
    assert folder.list("") == ["big.jsonl"]


def test_two_hosts_share_one_root(uri, options):
    first, second = (Store.open(uri, **options) for _ in range(2))
    second.check_root(first.root_id(), "worker-1")
    bucket = uri.removeprefix("s3://")
    assert first.spark_uri("p") == f"s3a://{bucket}/p"
    assert Store(first.fs, first.root, f"s3://conn@{bucket}").spark_uri() == f"s3a://{bucket}"


def test_a_missing_bucket_is_one_clear_error(options):
    store = Store.open(f"s3://nowhere-{uuid.uuid4().hex}/staging", **options)
    with pytest.raises(StagingError, match=r"cannot .* s3://nowhere-.*`\[broadway\] staging`"):
        store.folder("f").create("x", "")


def test_an_unreachable_server_is_one_clear_error(options):
    client = {"endpoint_url": "http://127.0.0.1:9"}
    store = Store.open(
        "s3://bucket/staging",
        **{**options, "client_kwargs": client, "config_kwargs": {"retries": {"max_attempts": 0}}},
    )
    with pytest.raises(StagingError, match=r"s3://bucket/staging: .*check `\[broadway\] staging`"):
        store.root_id()


def test_a_run_is_staged_settled_and_removed_in_a_bucket(uri, options):
    # Given two generations staged by clients of their own
    pipeline = pipeline_of(
        b=Batcher(engine="python", batch_size=40, batch_timeout=None, schema="n int")
    )
    generations = [
        publish(
            run_on(uri, options),
            pipeline,
            [[message(n, {"n": n}, batcher="b") for n in range(index, 100, 2)]],
            map_index=index,
        )
        for index in range(2)
    ]
    second_try = manifest_of(run_on(uri, options), generations[0], 0)
    assert not run_on(uri, options).publish(second_try)

    # When they are planned, read, and their outcomes recorded
    clock = ManualClock()
    run = run_on(uri, options, clock)
    plan = plan_batches(run, pipeline, "b", generations, try_label="1")
    batches = batches_of(run, plan)
    read = [
        message for batch in batches for message in read_batch(run_on(uri, options), plan, batch)
    ]
    assert sorted(message.data["n"] for message in read) == list(range(100))
    for batch in batches:
        record_outcome(run, plan, batch)

    # Then each is settled once
    unsettled = list(iter_unsettled(run.store, "Pipeline", "dag"))
    assert {record.generation for _, record in unsettled} == set(generations)
    for generation in generations:
        settlement, complete, _ = build_settlement(run, generation, pipeline, [plan], final=False)
        assert complete
        assert settlement.rest == ACK
        custodian = FakeCustodian({generation: [f"m-{n}" for n in range(50)]})
        report = settle_generation(run, run.generation(generation), custodian, settlement)
        assert report == SettleReport(acked=50)
    assert list(iter_unsettled(run.store, "Pipeline", "dag")) == []

    # and the run is removed once its retention has passed
    mark_balanced(run)
    clock.advance(8 * 24 * 3600)
    assert sweep_retention(run.store, "Pipeline", "dag", clock=clock) == ["run:1"]
    assert run_on(uri, options).generations() == []


def test_an_execution_that_fails_uploads_nothing(uri, options):
    from airflow_broadway.staging.writer import ProcessWriter

    run = run_on(uri, options)
    generation = open_generation(run).generation
    pipeline = pipeline_of(b=Batcher())
    writer = ProcessWriter(run, generation, pipeline)
    stage(writer, pipeline, message(0, batcher="b"))
    writer.entries([Entry("x", "", ACK)])
    writer.abort()
    del writer
    assert run.files.list(generation) == []


def test_failures_on_record_are_merged_and_read_in_a_bucket(uri, options, monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    clock = ManualClock()
    for run in range(20):
        Failures(StateFiles(uri, "sqs/orders"), 14).note({f"m{run}": run + 1}, clock.now())
    notes = StateFiles(uri, "sqs/orders")

    Failures(notes, 14).merge(clock.now())

    assert len(notes.names("attempts")) == 1
    assert Failures(notes, 14).of(["m0", "m19", "x"], clock.now()) == {"m0": 1, "m19": 20}
    assert list(notes.read_all(["attempts/gone.json"])) == []
