"""Requests of small batches to a bucket, counted by the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.runs.reading.runs import list_runs
from airflow_broadway.testing import ManualClock
from tests.s3_runs import Small, put_past_runs, requests_of_a_run, requests_of_tasks
from tests.s3_server import Requests, S3Server, s3_server
from tests.unit.runs.steps import Run

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

#: The most requests of a whole run for each of its batches.
REQUESTS_PER_BATCH = 2


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


def count_requests(
    server: S3Server, folder: Path, *, batches: int, tasks: int = 1
) -> dict[str, Requests]:
    """Returns the requests of each step of a run, whose clock stands still."""
    folder.mkdir()
    steps = requests_of_a_run(
        server, folder, messages=100 * batches, batch_size=100, tasks=tasks, clock=ManualClock()
    )
    by_step = dict(steps)
    for step, requests in by_step.items():
        kinds = {kind: requests.of(kind) for kind in ("PUT", "GET", "HEAD", "LIST", "DELETE")}
        print(f"{batches} batches, {step}: {requests.total()} requests, {kinds}")
    return by_step


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_batch_costs_at_most_two_requests(server, tmp_path, tasks):
    few = count_requests(server, tmp_path / "few", batches=10, tasks=tasks)
    many = count_requests(server, tmp_path / "many", batches=110, tasks=tasks)

    # Then a batch costs the requests that write its outcome, once, with its failures in it
    batch = many["batch"]
    assert batch.of("PUT", part="/outcomes/") == 110 + 1  # one for the merged copies
    assert batch.of("HEAD", part="/outcomes/") == batch.of("GET", part="/outcomes/") == 0
    # and settlement reads the merged copies, however many there are
    assert many["ack"].total() == few["ack"].total()
    assert many["ack"].of("GET", part="/outcomes/") == 1
    # and the check of the run's lease costs one request a second, not one per batch
    assert many["batch"].of("LIST") == few["batch"].of("LIST")

    # So the whole cost of a further batch is bounded
    more = sum(many[step].total() - few[step].total() for step in many)
    print(f"each further batch: {more / 100} requests")
    assert more <= REQUESTS_PER_BATCH * 100


def test_a_run_of_a_hundred_batches_keeps_to_two_requests_each(server, tmp_path):
    by_step = count_requests(server, tmp_path / "run", batches=100)
    assert sum(requests.total() for requests in by_step.values()) <= REQUESTS_PER_BATCH * 100


def test_a_small_file_is_read_with_one_request(server):
    uri = server.root()
    server.store(uri).folder("f").create("x", "text")
    folder = server.store(uri).folder("f")
    with server.counted() as requests:
        assert folder.read("x") == "text"
    assert requests.of("GET") == requests.total() == 1


def test_a_cleared_batcher_reads_merged_records(server, tmp_path):
    # Given a run whose batches have outcomes
    uri = server.root()

    def run() -> Run:
        sizes = {"default": {"batch_size": 10}}
        return Run(tmp_path, pipeline=Small, store=server.store(uri), batchers=sizes)

    with run().queue() as queue:
        queue.send([b"%d" % number for number in range(400)])
    reference = run().process()
    first = run().batch(reference)

    # When its batcher is cleared, then the result is the same, without a read of each outcome
    with server.counted() as requests:
        assert run().batch(reference, try_number=2) == first
    assert requests.of(part="/outcomes/") == requests.of("GET", part="/gathered-") == 1
    assert requests.of("PUT") == 2  # the file of this try, and its end
    assert requests.total() < 20


@pytest.mark.parametrize(("messages", "limit"), [(0, 60), (120, 120)])
def test_requests_do_not_grow_with_past_runs(server, tmp_path, messages, limit):
    counts = {}
    for past in (10, 1_010):
        uri, folder = server.root(), tmp_path / str(past)
        put_past_runs(uri, past)
        server.store(uri).root_id()  # created by the first of all runs
        folder.mkdir()
        with SqliteQueue(folder / "queue.db", "sums") as queue:
            queue.create()
            queue.send([b"%d" % number for number in range(messages)])
        by_step = requests_of_tasks(server, uri, folder, "run", messages=messages, batch_size=20)
        counts[past] = {step: requests.total() for step, requests in by_step.items()}
        print(past, counts[past])

    # A batch task checks its ownership once a second; the other tasks' requests are constant
    for steps in counts.values():
        assert sum(steps.values()) <= limit
        steps.pop("batch", None)
    assert counts[10] == counts[1_010]


def test_the_newest_runs_are_read_without_the_others(server, tmp_path):
    uri = server.root()
    put_past_runs(uri, 1_010)

    with server.counted() as requests:
        rows, total = list_runs(server.store(uri), newest=2)

    assert ([row.run_id for row in rows], total) == (["past-1", "past-0"], 1_010)
    # The pipelines, their Dags, 1,010 runs and marks, and the files of two runs
    assert requests.of("LIST") == 1 + 1 + 2 + 2 + 2 * 2
    assert requests.of("GET") == 2 * 2
