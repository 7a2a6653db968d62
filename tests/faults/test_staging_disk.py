"""Full disks and read-only folders; tests that mount a disk need root."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.staging import plan_data_files
from airflow_broadway.staging import writer as writer_module
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.store import Store
from airflow_broadway.staging.writer import ProcessWriter
from tests.unit.staging.kit import message, open_generation, open_run, pipeline_of, publish, stage

pytestmark = pytest.mark.faults

FULL = r"no space is left on its disk; free space there, or set `\[broadway\] staging`"
RANDOM = random.Random(1)


def mount(path: Path, size: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("root cannot mount on this machine")


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount(disk, "2m")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def noise(count: int) -> list[Message]:
    return [message(n, RANDOM.randbytes(1000), batcher="b") for n in range(count)]


def test_a_disk_that_fills_up_during_staging_is_one_clear_error(small_disk, monkeypatch):
    # Given a disk of 2 MiB
    monkeypatch.setattr(writer_module, "GROUP_ROWS", 100)
    run = open_run(small_disk)
    generation = open_generation(run).generation
    pipeline = pipeline_of(b=Batcher())

    # When 4 MB are staged there
    def fill() -> None:
        with ProcessWriter(run, generation, pipeline) as writer:
            for _ in range(40):
                stage(writer, pipeline, *noise(100))

    with pytest.raises(StagingError, match=FULL):
        fill()

    # Then no partial file is left, and a small file can still be written
    assert run.files.list(f"{generation}/messages/b") == []
    assert run.manifest(generation) is None
    assert run.files.create("small.json", "{}")


def test_a_full_disk_at_the_end_of_staging_is_one_clear_error(small_disk):
    run = open_run(small_disk)
    generation = open_generation(run).generation
    writer = ProcessWriter(run, generation, pipeline_of())

    def fill() -> None:
        for number in range(5000):
            retry = Verdict(Action.RETRY, reason=RANDOM.randbytes(500).hex())
            writer.entries([Entry(str(number), "", retry, 1)])
        writer.close()

    with pytest.raises(StagingError, match=FULL):
        fill()
    writer.abort()
    assert not run.files.exists(f"{generation}/failed-00000.jsonl")


def test_a_disk_that_fills_up_during_planning_leaves_no_plan(small_disk, monkeypatch):
    # Given a disk on which the messages fit once but not twice
    monkeypatch.setattr(plan_data_files, "BUFFER_ROWS", 200)
    run = open_run(small_disk)
    pipeline = pipeline_of(b=Batcher(engine="python"))
    generation = publish(run, pipeline, [noise(1300)])
    with pytest.raises(StagingError, match=FULL):
        plan_batches(run, pipeline, "b", [generation], try_label="1")
    assert not list(small_disk.rglob("plan.jsonl"))
    assert not list(small_disk.rglob("data-*"))


def test_a_full_disk_leaves_no_partial_file(small_disk):
    folder = Store.open(f"file://{small_disk}").folder("f")
    folder.create("first.json", "{}")
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(bytes(4 * 1024 * 1024))
    with pytest.raises(StagingError, match=FULL):
        folder.create("second.json", "x" * 10_000)
    with pytest.raises(StagingError, match=FULL):
        folder.replace("first.json", "x" * 10_000)
    assert folder.list("") == ["first.json"]
    assert folder.read("first.json") == "{}"
    assert not list(small_disk.rglob(".tmp-*"))


def test_a_folder_mounted_read_only_is_one_clear_error(small_disk):
    folder = Store.open(f"file://{small_disk}").folder("f")
    folder.create("a.json", "{}")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StagingError, match="its file system is read-only; set"):
        folder.create("b.json", "{}")
    with pytest.raises(StagingError, match="its file system is read-only; set"):
        folder.replace("a.json", "{}")
    assert folder.read("a.json") == "{}"


def test_a_root_on_a_read_only_disk_is_one_clear_error(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for root in (small_disk, small_disk / "new"):
        with pytest.raises(StagingError, match="its file system is read-only"):
            Store.open(f"file://{root}").root_id()
