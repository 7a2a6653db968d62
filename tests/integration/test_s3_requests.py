"""What small batches ask of a bucket, counted by the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_broadway.testing import ManualClock
from tests.s3_runs import Small, requests_of_a_run
from tests.s3_server import Requests, S3Server, s3_server
from tests.unit.runs.steps import Run

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

#: Requests that the whole of a run costs for each of its batches, at most.
A_BATCH = 2


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


def asked(server: S3Server, folder: Path, *, batches: int, tasks: int = 1) -> dict[str, Requests]:
    """What each step of a run asks; its clock stands still."""
    folder.mkdir()
    steps = requests_of_a_run(
        server, folder, messages=100 * batches, batch_size=100, tasks=tasks, clock=ManualClock()
    )
    found = dict(steps)
    for step, requests in found.items():
        kinds = {kind: requests.of(kind) for kind in ("PUT", "GET", "HEAD", "LIST", "DELETE")}
        print(f"{batches} batches, {step}: {requests.total()} requests, {kinds}")
    return found


@pytest.mark.parametrize("tasks", [1, 3])
def test_a_batch_costs_at_most_two_requests(server, tmp_path, tasks):
    few = asked(server, tmp_path / "few", batches=10, tasks=tasks)
    many = asked(server, tmp_path / "many", batches=110, tasks=tasks)

    # Then a batch costs the requests that write its outcome, once, with its failures in it
    batch = many["batch"]
    assert batch.of("PUT", part="/outcomes/") == 110 + 1  # the copies of all
    assert batch.of("HEAD", part="/outcomes/") == batch.of("GET", part="/outcomes/") == 0
    # and settlement reads the merged copies, however many there are
    assert many["ack"].total() == few["ack"].total()
    assert many["ack"].of("GET", part="/outcomes/") == 1
    # and the check of the run's lease costs one request a second, not one per batch
    assert many["batch"].of("LIST") == few["batch"].of("LIST")

    # So the whole of what a further batch costs is bounded
    more = sum(many[step].total() - few[step].total() for step in many)
    print(f"each further batch: {more / 100} requests")
    assert more <= A_BATCH * 100


def test_a_run_of_a_hundred_batches_keeps_to_two_requests_each(server, tmp_path):
    found = asked(server, tmp_path / "run", batches=100)
    assert sum(requests.total() for requests in found.values()) <= A_BATCH * 100


def test_a_small_file_is_read_with_one_request(server):
    uri = server.root()
    server.store(uri).folder("f").create("x", "text")
    folder = server.store(uri).folder("f")
    with server.counted() as requests:
        assert folder.read("x") == "text"
    assert requests.of("GET") == requests.total() == 1


def test_a_cleared_batcher_reads_merged_records(server, tmp_path):
    # Given a run whose batches are done
    uri = server.root()

    def run() -> Run:
        sizes = {"default": {"batch_size": 10}}
        return Run(tmp_path, pipeline=Small, store=server.store(uri), batchers=sizes)

    with run().queue() as queue:
        queue.send([b"%d" % number for number in range(400)])
    reference = run().process()
    done = run().batch(reference)

    # When its batcher is cleared, then it finds the same, without a look at each outcome
    with server.counted() as requests:
        assert run().batch(reference, try_number=2) == done
    assert requests.of(part="/outcomes/") == requests.of("GET", part="/gathered-") == 1
    assert requests.of("PUT") == 2  # the file of this try, and that it ended
    assert requests.total() < 20
