"""Staging in Azure's Blob Storage, against Microsoft's emulator; Spark reads it through Arrow."""

from __future__ import annotations

import shutil
import socket
import subprocess
import uuid
from contextlib import suppress
from typing import Any

import pytest

from airflow_broadway.spark.application import run_work
from airflow_broadway.spark.arrow import ArrowFiles
from airflow_broadway.staging.client import client_options
from airflow_broadway.staging.store import Store
from scripts.local_airflow import free_port
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged, rows
from tests.unit.spark.session import spark_session
from tests.waiting import eventually

pytest.importorskip("adlfs", reason="no client of Azure here: pip install adlfs")
pytestmark = [pytest.mark.spark, pytest.mark.slow]

#: The emulator's account, the same everywhere.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def options():
    """The client's options for an emulator with an empty container ``box``."""
    azurite = shutil.which("azurite-blob")
    if azurite is None:
        pytest.skip("no emulator of Azure on PATH: npm install -g azurite")
    port = free_port()
    arguments = ["--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck"]
    process = subprocess.Popen([azurite, *arguments, "--silent", "--disableTelemetry"])

    def listens() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    try:
        eventually(listens)
        account = f"http://127.0.0.1:{port}/devstoreaccount1"
        yield {
            "connection_string": "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;"
            f"AccountKey={KEY};BlobEndpoint={account};"
        }
    finally:
        process.terminate()
        process.wait()


def test_spark_reads_batches_and_records_outcomes(options, tmp_path):
    import fsspec

    # Given a root in a new container, and the files of a run
    box = f"box-{uuid.uuid4().hex}"
    fs: Any = fsspec.filesystem("abfs", **options)
    fs.mkdir(box)
    store = Store.open(f"abfs://{box}/staging", **options)
    store.root_id()
    staged = Staged(tmp_path / "Counting" / "dag" / "run")
    plan = staged.plan("default", [Planned(f"b{n}", rows(5, prefix=f"b{n}-")) for n in range(3)])
    seen: dict[str, list[str]] = {}

    def callback(messages: Any, info: Any) -> None:
        seen[info.batch_id] = sorted(row.message_id for row in messages.collect())

    Counting.callback = staticmethod(callback)
    work = staged.work(Counting, plan)
    fs.put(f"{tmp_path}/Counting/", f"{box}/staging/Counting/", recursive=True)

    # When the driver opens it as it is handed over
    uri = f"{store.spark_uri()}/Counting/dag/run"
    files = ArrowFiles(uri, client_options(store.fs))
    files.check_executor(spark_session(), f"{plan.path}/plan.jsonl")
    assert run_work(spark_session(), uri, files, work, arrow=files) == 0

    # Then batches are read, outcomes recorded, and a file that counts once is written once
    assert seen == {f"b{n}": [f"b{n}-{i}" for i in range(5)] for n in range(3)}
    staged.files = files  # type: ignore[assignment]
    assert {made.successful for made in staged.outcomes("default").values()} == {5}
    assert files.create("once", "1")
    assert not files.create("once", "2")
    assert files.read("once") == "1"
