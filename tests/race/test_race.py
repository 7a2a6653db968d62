"""``make race``: it counts lost and doubled rows, and its peers match the page."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.rabbitmq_fixtures import skip_without_own_server
from tests.race import page
from tests.race.__main__ import OURS, PEERS, Race
from tests.race.brokers import WRAPS, RabbitMQ, payload
from tests.race.counting import RowCounts, Rows, count_rows
from tests.race.passes import PEERS as FOLDER

LOOP = "pika loop"


def write(folder: Path, name: str, *numbers: int, sent: float = 0.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"n": list(numbers), "sent": [sent] * len(numbers)})
    pq.write_table(table, folder / name)


def test_lost_and_doubled_rows_are_counted(tmp_path):
    write(tmp_path, "a.parquet", 0, 1, 2)
    write(tmp_path / "topic" / "0", "b.parquet", 2, 4)
    rows = Rows(tmp_path)

    assert rows.count() == 5
    assert count_rows(rows.numbers(), 5) == RowCounts(lost=1, doubled=1)
    with pytest.raises(ValueError, match=r"not sent: \[4\]"):
        count_rows(rows.numbers(), 4)


def test_rows_of_hidden_torn_and_earlier_files_do_not_count(tmp_path):
    write(tmp_path, "earlier.parquet", 0)
    rows = Rows(tmp_path)
    seen = set(rows.files())
    write(tmp_path / "_staged", "a.parquet", 1)
    write(tmp_path, ".b.parquet", 2)
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")

    assert rows.count(seen) == 0
    write(tmp_path, "torn.parquet", 3)
    assert list(rows.numbers(seen)) == [3]


def test_rows_of_spark_are_visible_once_its_log_lists_their_file(tmp_path):
    write(tmp_path, "part-0.parquet", 0)
    write(tmp_path, "part-1.parquet", 1)
    log = tmp_path / "_spark_metadata"
    log.mkdir()
    entry = {"path": f"file://{tmp_path}/part-1.parquet"}
    (log / "0").write_text("v1\n" + json.dumps(entry))

    assert list(Rows(tmp_path).numbers()) == [1]


def test_latency_is_from_sending_until_the_file_is_visible(tmp_path):
    write(tmp_path, "hidden.tmp", 0, sent=time.time() - 60)
    os.utime(tmp_path / "hidden.tmp", (0, 0))
    os.rename(tmp_path / "hidden.tmp", tmp_path / "a.parquet")

    [seconds] = Rows(tmp_path).latencies()
    assert 59 < seconds < 90  # a file system's clock lags by milliseconds


def test_messages_have_200_bytes():
    assert len(payload(0)) == len(payload(999_999)) == 200
    for wrap in WRAPS.values():
        assert b'"n": 7,' in wrap(7, "queue")[0]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.broker}-{peer.name}")
def test_each_peer_compiles_and_names_its_settings(peer):
    for name in peer.files:
        compile((FOLDER / name).read_text("utf-8"), name, "exec")
    assert "``" in peer.settings or "threads" in peer.settings
    assert 0 < peer.lines < 60


def test_page_and_plot_show_each_peer(tmp_path):
    row = dict.fromkeys(("kills", "lost", "doubled", "lines"), 9) | {
        "name": "a & b",
        "broker": "kafka",
        "version": "1",
        "settings": "``x``",
        "rate": 5,
        "ratio": 0.5,
        "cpu": 1.0,
        "p50": 0.1,
        "p99": 0.2,
    }
    conditions = {"at": "now", "load": 0.1, "messages": 10, "tries": 1, "kills": 1, "seed": 1}
    result = {**conditions, "figures": [row], "left_out": {"c": "it ended"}}
    page.write({"kafka": result}, tmp_path)

    text = (tmp_path / "race.md").read_text("utf-8")
    assert "| a & b | 5 | 0.5 | 1.0 | 0.1 | 0.2 | 9 | 9 | 9 | 9 |" in text
    assert "- c: it ended." in text
    drawn = ElementTree.parse(tmp_path / "race.svg").getroot().itertext()
    assert {"a & b", "0.5 · 9 lost, 9 doubled"} <= {text.strip() for text in drawn}


@pytest.mark.slow
def test_kills_lose_and_double_no_row_of_ours(tmp_path):
    skip_without_own_server()
    broker = RabbitMQ(tmp_path / "broker")
    left_out: dict[str, str] = {}
    peers = [peer for peer in PEERS if peer.broker == "rabbitmq" and peer.name in {LOOP, OURS}]
    try:
        race = Race(broker, tmp_path, 1, left_out)
        rows = {row["name"]: row for row in race.run(peers, 2_000, 1, 3, pace=False)}
    finally:
        broker.stop()

    assert left_out == {}
    assert rows[LOOP]["lost"] == 0
    assert (rows[OURS]["lost"], rows[OURS]["doubled"]) == (0, 0)
    assert min(row["kills"] for row in rows.values()) > 0
