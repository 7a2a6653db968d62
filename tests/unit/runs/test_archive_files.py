"""``airflow-broadway archive`` lists, shows, exports, imports and removes messages."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_broadway.staging.archive.reader import look
from tests.cli_runs import ran
from tests.unit.runs.archive_steps import NINE, World, of_minutes

NINE_TO_TEN = ("--start", "2013-01-01T09:00:00Z", "--end", "2013-01-01T10:00:00")


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


class Command:
    def __init__(self, world: World, capsys: pytest.CaptureFixture[str]) -> None:
        self.world = world
        self.capsys = capsys
        self.printed = ""

    def __call__(self, action: str, *arguments: str) -> tuple[int, str]:
        pipeline_flags = ("--pipeline-name", "Minutes", "--staging", self.world.store.uri)
        result = ran(self.capsys, "archive", action, *pipeline_flags, *arguments)
        self.printed = result.out
        return result.code, result.out + result.err

    def json(self, action: str, *arguments: str) -> Any:
        self.capsys.readouterr()
        code, output = self(action, "--json", *arguments)
        assert code == 0, output
        return json.loads(self.printed)


@pytest.fixture
def run(world, capsys):
    return Command(world, capsys)


def test_list_groups_by_day_and_hour_and_show_is_in_order(world, run):
    world.store.root_id()
    assert run("list")[0] == 2  # no pipeline of this name has run
    world.live(3, 1, 61)

    assert run.json("list") == [{"time": "2013-01-01", "hours": 2, "files": 2, "messages": 3}]
    assert [row["messages"] for row in run.json("list", "--hours")] == [2, 1]
    assert [row["messages"] for row in run.json("list", *NINE_TO_TEN)] == [2]
    rows = run.json("show", *NINE_TO_TEN)
    assert [json.loads(row["payload"])["minute"] for row in rows] == [1, 3]
    assert "These are the first 1" in run("show", "--limit", "1", *NINE_TO_TEN)[1]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_imported_file_is_processed_like_received_messages(world, run, tmp_path, kind):
    rows = [{"at": (NINE + timedelta(minutes=n)).isoformat(), "minute": n} for n in (5, 4)]
    path = tmp_path / f"flights.{kind}"
    if kind == "csv":
        path.write_text("at,minute\n" + "".join(f"{r['at']},{r['minute']}\n" for r in rows))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)

    assert run.json("import", str(path), "--time", "at")["messages"] == 2
    assert "imported before: nothing was changed" in run("import", str(path), "--time", "at")[1]

    report = world.backfill("again")
    assert report["totals"]["acked"] == 2
    assert [int(row) for row in world.rows("again")] == [4, 5]


def test_payload_and_id_are_columns_of_the_file(world, run, tmp_path):
    path = tmp_path / "own.jsonl"
    payload = json.dumps({"minute": 7})
    path.write_text(json.dumps({"key": "m7", "t": NINE.timestamp(), "body": payload}) + "\n")

    run.json("import", str(path), "--time", "t", "--payload", "body", "--id", "key")

    [rows] = run.json("show", *NINE_TO_TEN)
    assert (rows["message_id"], rows["payload"]) == ("m7", payload)


@pytest.mark.parametrize(
    ("text", "arguments", "error"),
    [
        ('{"a": 1}', ("--time", "at"), "row 1 has no column 'at'; it has ['a']"),
        ('{"at": ""}', ("--time", "at"), "row 1 has nothing in the column 'at'"),
        ('{"at": "noon"}', ("--time", "at"), "'noon' in the column 'at' is not a timestamp"),
        ("no json", ("--time", "at"), "line 1, is no JSON"),
        ("[1]", ("--time", "at"), "line 1, is no JSON object"),
        ("", ("--time", "at"), "has no rows"),
    ],
)
def test_file_with_unsuitable_columns_is_refused_whole(
    world, run, tmp_path, text, arguments, error
):
    good = json.dumps({"at": NINE.isoformat()}) + "\n" if text.startswith('{"at"') else ""
    path = tmp_path / "odd.jsonl"
    path.write_text(f"{text}\n{good}" if text else "")

    code, out = run("import", str(path), *arguments)

    assert code == 2
    assert error in out
    assert look(world.archive).messages == 0


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("latin.csv", "at,who\n2013-01-01,J\xfcrgen\n".encode("latin-1"), "is no text in UTF-8"),
        ("latin.jsonl", '{"at": "J\xfcrgen"}\n'.encode("latin-1"), "is no text in UTF-8"),
        ("long.csv", b"at,x\n2013-01-01," + b"x" * 200_000, "line 2, is no CSV: field larger"),
        ("twice.csv", b"at,x,x\n2013-01-01,1,2\n", "has more than one column 'x'"),
        ("millis.csv", b"at,x\n1357030800000,1\n", "is not a timestamp"),
        ("year.csv", b"at,x\n2013,1\n", "is not a timestamp"),
        ("month.csv", b"at,x\n201301,1\n", "is not a timestamp"),
        ("minute.csv", b"at,x\n201301010900,1\n", "is not a timestamp"),
        ("true.jsonl", b'{"at": true}', "is not a timestamp"),
        ("early.jsonl", b'{"at": "0001-01-01T00:00:00+05:00"}', "is not a timestamp"),
    ],
)
def test_unreadable_file_is_refused_with_one_sentence(world, run, tmp_path, name, data, error):
    path = tmp_path / name
    path.write_bytes(data)

    code, out = run("import", str(path), "--time", "at")

    assert code == 2
    assert error in out
    assert "nothing was imported" in out
    assert look(world.archive).messages == 0


def test_byte_order_mark_and_lone_surrogates_are_imported(world, run, tmp_path):
    sheet, odd = tmp_path / "sheet.csv", tmp_path / "odd.jsonl"
    sheet.write_bytes(b"\xef\xbb\xbfat,minute\r\n2013-01-01T09:00:00Z,1\r\n")
    odd.write_text('{"at": "2013-01-01T09:01:00Z", "id": "half \\ud83d"}\n')

    run.json("import", str(sheet), "--time", "at")
    run.json("import", str(odd), "--time", "at", "--id", "id")

    assert [row["message_id"] for row in run.json("show", *NINE_TO_TEN)][1] == "half \\ud83d"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (f"{NINE.timestamp():.0f}", NINE),
        (f" {NINE.timestamp():.3f} ", NINE),
        ("-1.5", datetime(1969, 12, 31, 23, 59, 58, 500_000, UTC)),
        ("-1234567", datetime(1969, 12, 17, 17, 3, 53, tzinfo=UTC)),
        ("123456.5", datetime(1970, 1, 2, 10, 17, 36, 500_000, UTC)),
        ("20130101", datetime(2013, 1, 1, tzinfo=UTC)),
        ("20130101T0900", NINE),
        ("2013-01-01T04:00:00-05:00", NINE),
    ],
)
def test_csv_timestamps_are_seconds_or_iso_8601(world, run, tmp_path, written, read):
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(f"at,minute\n{written},1\n")

    run.json("import", str(sheet), "--time", "at")

    hour = read.replace(minute=0, second=0, microsecond=0)
    around = ("--start", hour.isoformat(), "--end", (hour + timedelta(hours=1)).isoformat())
    assert [row["time"] for row in run.json("show", *around)] == [read.isoformat()]


def test_odd_files_are_refused(world, run, tmp_path):
    csv, other = tmp_path / "odd.csv", tmp_path / "odd.txt"
    csv.write_text("at,minute\n2013-01-01\n")
    other.write_text("x")
    assert "line 2, has not as many columns" in run("import", str(csv), "--time", "at")[1]
    assert "ends in none of" in run("import", str(other), "--time", "at")[1]
    broken = tmp_path / "odd.parquet"
    broken.write_text("x")
    assert "is no Parquet file" in run("import", str(broken), "--time", "at")[1]
    assert "cannot be read" in run("import", str(tmp_path / "none.csv"), "--time", "at")[1]


def test_exported_file_can_be_imported(world, run, tmp_path):
    world.live(3, 1, 61)
    lines, parquet = tmp_path / "out.jsonl", tmp_path / "out.parquet"

    assert run.json("export", str(lines), *NINE_TO_TEN)["messages"] == 2
    assert run.json("export", str(parquet), *NINE_TO_TEN)["messages"] == 2
    assert "exists already" in run("export", str(lines), *NINE_TO_TEN)[1]
    assert "must end in .parquet or .jsonl" in run("export", "x.csv", *NINE_TO_TEN)[1]

    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other")
    run.world = other
    columns = ("--time", "time", "--payload", "payload", "--id", "message_id")
    run.json("import", str(parquet), *columns)
    other.backfill("again")
    world.backfill("again")
    assert [batch["batch_id"] for batch in other.sink("again")] == [
        batch["batch_id"] for batch in world.sink("again")
    ]


def test_backfill_failures_are_listed_with_reason(world, run):
    world.send({"minute": 1, "fails": "process"})
    for run_id in ("one", "two"):
        world.run(run_id).all()
    assert "No failures of archive runs" in run("failed")[1]

    world.backfill("again")

    [failure] = run.json("failed")
    assert (failure["run_id"], failure["reason"], failure["stage"]) == ("again", "sour", "process")
    assert "sour" in run("failed")[1]


def test_purge_removes_hours_and_is_reported(world, run):
    world.live(1, 2, 61)
    odd = ("--start", "2013-01-01T09:00:00Z", "--end", "2013-01-01T09:30:00Z")

    assert "use --yes to remove" in run("purge", *NINE_TO_TEN)[1]
    assert "is not the beginning of an hour" in run("purge", "--yes", *odd)[1]
    assert run.json("purge", "--yes", *NINE_TO_TEN) == {"hours": 1, "messages": 2}

    assert look(world.archive).messages == 1
    assert len(world.archive.list("index")) == 1
    report = world.run("again", of_minutes(0, 120)).all()
    assert "some of it was removed" in "; ".join(report["notes"])
    run.json("purge", "--yes", "--start", "2013-01-01T10:00:00Z", "--end", "2013-01-02T00:00:00Z")
    assert world.archive.list("index") == []


def test_expired_hours_are_removed_by_a_later_run(tmp_path):
    world = World(tmp_path, archive={"keep": 3600.0})
    world.live(1)
    assert look(world.archive).messages == 1

    world.run("later").process()

    assert look(world.archive).messages == 0
    report = world.backfill("again")
    assert "some of it was removed, by retention" in "; ".join(report["notes"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--start", "noon", "--end", "2013-01-01"), "--start: expected a timestamp in ISO 8601"),
        (("--start", "2013-01-02", "--end", "2013-01-01"), "is to be before --end"),
    ],
)
def test_invalid_interval_is_refused(world, run, arguments, error):
    world.minutes(1)
    world.run("live").process()
    code, out = run("show", *arguments)
    assert (code, error in out) == (2, True)
