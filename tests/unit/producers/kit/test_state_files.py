from __future__ import annotations

import pytest

from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.kit.state_files import StateFiles, state_files


@pytest.fixture(params=["disk", "memory"])
def files(request, tmp_path):
    return state_files(f"file://{tmp_path}" if request.param == "disk" else None, "some/queue")


def test_file_round_trips_lists_and_removes(files):
    files.write("a/1.json", [1])
    files.write("a/2.json", {"two": 2})
    files.write("b.json", "three")

    assert files.read("a/2.json") == {"two": 2}
    assert files.read("a/3.json") is None
    assert dict(files.read_all(["a/1.json", "a/3.json"])) == {"a/1.json": [1]}
    assert (files.names("a"), files.names()) == (["1.json", "2.json"], ["a", "b.json"])
    assert (files.exists("b.json"), files.exists("c.json")) == (True, False)
    files.remove("a")
    files.discard(["b.json", "c.json"])
    assert files.names() == []


def test_concurrent_creates_have_one_winner(files):
    assert files.create("once.json", "one")
    assert not files.create("once.json", "two")
    assert files.read("once.json") == "one"


@pytest.mark.parametrize(
    "use",
    [
        lambda files: files.read("a.json"),
        lambda files: list(files.read_all(["a.json"])),
        lambda files: files.write("a.json", 1),
        lambda files: files.create("a.json", 1),
        lambda files: files.names(),
        lambda files: files.exists("a"),
        lambda files: files.remove("a"),
        lambda files: files.discard(["a"]),
    ],
)
def test_unreachable_bucket_is_one_error(use, monkeypatch):
    """botocore's EndpointConnectionError is no OSError."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-bucket")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    files = StateFiles("s3://bucket/staging", "sqs/orders")
    files._fs.clear_instance_cache()
    files = StateFiles("s3://bucket/staging", "sqs/orders")
    files._fs.retries = 1

    with pytest.raises(StagingError, match=r"bucket/staging/sqs/orders.* cannot be \w+: .*127"):
        use(files)

    files._fs.clear_instance_cache()
