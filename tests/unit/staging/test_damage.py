"""Staged files that are not as they were written: nothing is acknowledged by them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_broadway import Broadway
from airflow_broadway.core.custody.protocol import Delivery, Entry, Settlement
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import StagingDamaged, StagingError
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.settling.settlement import build_settlement
from tests.unit.staging.kit import (
    Silent,
    batches_of,
    message,
    open_run,
    pipeline_of,
    publish,
    record_outcome,
)


def failed(name: str) -> Entry:
    return Entry(name, "receipt", Verdict(Action.DEAD_LETTER, 0.0, "why", "batch"))


class Ready:
    """A generation of seven messages: one failed before its batch, two in two batches of three."""

    def __init__(self, root: Path, on_success: str = "ack") -> None:
        self.root = root
        self.run: StagedRun = open_run(root)
        producer = Silent(on_success=on_success)
        self.pipeline: Broadway = pipeline_of(producer, b=Batcher(batch_size=3))
        messages = [message(n, batcher="b", delivery=Delivery(receipt="r")) for n in range(6)]
        self.generation = publish(self.run, self.pipeline, [messages], entries=[failed("early")])
        plan = plan_batches(self.run, self.pipeline, "b", [self.generation], try_label="1")
        first, second = batches_of(self.run, plan)
        record_outcome(self.run, plan, first, entries=[failed("m-0"), failed("m-1")])
        record_outcome(self.run, plan, second)

    def settlement(self) -> Settlement:
        run = open_run(self.root)  # as another task, which has read nothing
        plans = Recorded(run).deciding(self.pipeline.batchers, self.generation)
        return build_settlement(run, self.generation, self.pipeline, plans, final=True)[0]

    def all_read(self) -> None:
        """Reads all that a custodian may need."""
        settlement = self.settlement()
        list(settlement.entries())
        assert settlement.everything is not None
        list(settlement.everything())

    def file(self, pattern: str) -> Path:
        [path] = self.root.rglob(pattern)
        return path


def without_last_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def changed(path: Path) -> None:
    """Changes the verdict; the file stays JSON."""
    raw = path.read_bytes()
    for old, new in ((b"dead_letter", b'ack", "x": "y'), (b'"failed": 2', b'"failed": 1')):
        raw = raw.replace(old, new)
    assert raw != path.read_bytes()
    path.write_bytes(raw)


def zeroed(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def gone(path: Path) -> None:
    path.unlink()


ENTRIES = ["failed-*.jsonl", "*.entries.jsonl"]


@pytest.mark.parametrize("damage", [without_last_line, torn, changed, zeroed, gone])
@pytest.mark.parametrize("pattern", ENTRIES)
def test_damaged_entries_file_acks_nothing(tmp_path, pattern, damage):
    ready = Ready(tmp_path)
    damage(ready.file(pattern))
    with pytest.raises(StagingDamaged, match=r"jsonl .*  Nothing of its generation is acknowl"):
        ready.settlement()


@pytest.mark.parametrize("damage", [without_last_line, torn, zeroed])
def test_damaged_plan_acks_nothing(tmp_path, damage):
    ready = Ready(tmp_path)
    damage(ready.file("plan.jsonl"))
    with pytest.raises(StagingDamaged, match=r"plan\.jsonl"):
        ready.settlement()


def test_changed_plan_header_acks_nothing(tmp_path):
    ready = Ready(tmp_path)
    path = ready.file("plan.jsonl")
    path.write_text(path.read_text().replace('"messages": 6', '"messages": 5', 1))
    with pytest.raises(StagingDamaged, match="its seal is broken"):
        ready.settlement()


def test_changed_outcome_or_manifest_acks_nothing(tmp_path):
    ready = Ready(tmp_path)
    [path] = [p for p in tmp_path.rglob("outcomes/b/*/*.json") if '"failed": 2' in p.read_text()]
    whole = path.read_text()
    path.write_text(whole.replace('"entries": "', '"entries": null, "x": "'))
    with pytest.raises(StagingDamaged, match="its seal is broken"):
        ready.settlement()
    path.write_text(whole)
    ready.settlement()
    manifest = ready.file("manifest.json")
    manifest.write_text(manifest.read_text().replace('"received": 7', '"received": 6'))
    with pytest.raises(StagingDamaged, match="its seal is broken"):
        ready.settlement()


@pytest.mark.parametrize("on_success", ["ack", "noop"])
def test_lost_or_shortened_message_file_settles_nothing(tmp_path, on_success):
    # Successes that are not simply acked are read from the data files, else from the messages
    ready = Ready(tmp_path, on_success)
    ready.all_read()
    pattern = "part-*.parquet" if on_success == "ack" else "data-*.parquet"
    path = ready.file(pattern)
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(StagingDamaged, match="is not there"):
        ready.all_read()
    # A file of another run's, with fewer rows
    other = Ready(tmp_path / "other", on_success)
    fewer = open_run(tmp_path / "fewer")
    publish(fewer, other.pipeline, [[message(0, batcher="b", delivery=Delivery(receipt="r"))]])
    if on_success == "ack":
        [small] = (tmp_path / "fewer").rglob("part-*.parquet")
        path.write_bytes(small.read_bytes())
        with pytest.raises(StagingDamaged, match=r"6 messages staged .* hold 1"):
            ready.all_read()
    else:  # a row is of another generation
        path.write_bytes(whole)
        table = pq.read_table(path)
        place = table.column_names.index("source")
        field, sources = table.field(place), table.column(place).to_pylist()
        others = pa.array([1, *sources[1:]], field.type)
        pq.write_table(table.set_column(place, field, others), path)
        with pytest.raises(StagingDamaged, match=r"hold 6 messages .* hold 5"):
            ready.all_read()
    path.write_bytes(whole)
    ready.all_read()


def test_flipped_bit_in_a_column_is_detected(tmp_path):
    ready = Ready(tmp_path)
    path = ready.file("part-*.parquet")
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    assert column.path_in_schema == "message_id"
    raw = bytearray(path.read_bytes())
    raw[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(StagingError, match=rf"cannot read .*{path.name} .*CRC checksum"):
        ready.all_read()


def test_surplus_received_count_is_damage(tmp_path):
    ready = Ready(tmp_path)
    manifest = ready.run.manifest(ready.generation)
    assert manifest is not None
    more = dataclasses.replace(manifest, received=8)
    ready.run.files.replace(f"{ready.generation}/manifest.json", more.dumps())
    text = "received 8 messages, but has 6 staged ones and 1 line of"
    with pytest.raises(StagingDamaged, match=text):
        ready.settlement()


@pytest.mark.parametrize("pattern", ["manifest.json", "outcomes/b/*/*.json", "plan.jsonl"])
def test_file_without_a_seal_acks_nothing(tmp_path, pattern):
    ready = Ready(tmp_path)
    for path in tmp_path.rglob(pattern):
        head, *lines = path.read_text().splitlines(keepends=True)
        value = json.loads(head)
        del value["seal"]
        path.write_text("".join([json.dumps(value) + "\n", *lines]))
    with pytest.raises(StagingDamaged, match="broken or missing"):
        ready.settlement()
