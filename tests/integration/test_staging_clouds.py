"""Staging in Azure Blob Storage and Google Cloud Storage, against emulators, read by Spark."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest

from airflow_broadway.spark.application import run_work
from airflow_broadway.spark.arrow import ArrowFiles
from airflow_broadway.spark.session import ClassicSessions
from airflow_broadway.staging.client import client_options
from airflow_broadway.staging.store import Store
from scripts.local_airflow import free_port
from tests.server_process import answers
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged, rows
from tests.unit.spark.session import spark_session
from tests.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.slow]

#: The emulator's account, the same everywhere.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Emulator(NamedTuple):
    """A store's client, and the emulator of the store.

    :param install: The command that installs the emulator.
    :param options: The client's options, by the emulator's port.
    """

    client: str
    program: str
    install: str
    arguments: Sequence[str]
    options: Callable[[int], dict[str, Any]]


EMULATORS = {
    "abfs": Emulator(
        "adlfs",
        "azurite-blob",
        "npm install -g azurite",
        [
            "--blobPort",
            "{port}",
            "--inMemoryPersistence",
            "--skipApiVersionCheck",
            "--silent",
            "--disableTelemetry",
        ],
        lambda port: {
            "connection_string": "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;"
            f"AccountKey={KEY};BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
        },
    ),
    "gs": Emulator(
        "gcsfs",
        "fake-gcs-server",
        "go install github.com/fsouza/fake-gcs-server@latest",
        ["-scheme", "http", "-host", "127.0.0.1", "-port", "{port}", "-backend", "memory"],
        lambda port: {
            "endpoint_url": f"http://127.0.0.1:{port}",
            "token": "anon",
            "project": "project",
        },
    ),
}


@pytest.fixture(scope="module", params=EMULATORS)
def emulated(request):
    """Yields a scheme, and the client's options for its emulator."""
    scheme = request.param
    emulator = EMULATORS[scheme]
    # Else gcsfs requests the type of each bucket from Google, by gRPC.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip(emulator.client, reason=f"pip install {emulator.client}")
    program = shutil.which(emulator.program)
    if program is None:
        pytest.skip(f"{emulator.program} is not on PATH: {emulator.install}")
    port = free_port()
    arguments = [argument.format(port=port) for argument in emulator.arguments]
    process = subprocess.Popen([program, *arguments], stderr=subprocess.DEVNULL)

    try:
        eventually(partial(answers, "127.0.0.1", port))
        yield scheme, emulator.options(port)
    finally:
        process.terminate()
        process.wait()


def test_spark_reads_batches_and_records_outcomes(emulated, tmp_path):
    scheme, options = emulated
    import fsspec

    # Given a root in a new container, and the files of a run
    box = f"box-{uuid.uuid4().hex}"
    fs: Any = fsspec.filesystem(scheme, **options)
    fs.mkdir(box)
    store = Store.open(f"{scheme}://{box}/staging", **options)
    store.root_id()
    staged = Staged(tmp_path / "Counting" / "dag" / "run")
    plan = staged.plan("default", [Planned(f"b{n}", rows(5, prefix=f"b{n}-")) for n in range(3)])
    seen: dict[str, list[str]] = {}

    def callback(messages: Any, info: Any) -> None:
        seen[info.batch_id] = sorted(row.message_id for row in messages.collect())

    Counting.callback = staticmethod(callback)
    work = staged.work(Counting, plan)
    fs.put(f"{tmp_path}/Counting/", f"{box}/staging/Counting/", recursive=True)

    # When the driver opens it with the options that it receives
    uri = f"{store.spark_uri()}/Counting/dag/run"
    files = ArrowFiles(uri, client_options(store.fs))
    files.check_executor(spark_session(), f"{plan.path}/plan.jsonl")
    assert run_work(ClassicSessions(spark_session()), uri, files, work, arrow=files) == 0

    # Then batches are read, outcomes recorded, and a file that counts once is written once
    assert seen == {f"b{n}": [f"b{n}-{i}" for i in range(5)] for n in range(3)}
    staged.files = files  # type: ignore[assignment]
    assert {outcome.successful for outcome in staged.outcomes("default").values()} == {5}
    assert files.create("once", "1")
    assert not files.create("once", "2")
    assert files.read("once") == "1"
