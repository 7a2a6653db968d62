"""``airflow-broadway archive``: what is kept is listed, shown, taken in and out, and removed."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_broadway.staging.archive.reader import look
from tests.cli_runs import ran
from tests.unit.runs.archive_steps import NINE, World, of_minutes

NINE_TO_TEN = ("--start", "2013-01-01T09:00:00Z", "--end", "2013-01-01T10:00:00")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


class Command:
    def __init__(self, world: World, capsys: pytest.CaptureFixture[str]) -> None:
        self.world = world
        self.capsys = capsys
        self.printed = ""

    def __call__(self, action: str, *arguments: str) -> tuple[int, str]:
        about = ("--pipeline-name", "Minutes", "--staging", self.world.store.uri)
        done = ran(self.capsys, "archive", action, *about, *arguments)
        self.printed = done.out
        return done.code, done.out + done.err

    def json(self, action: str, *arguments: str) -> Any:
        self.capsys.readouterr()
        code, said = self(action, "--json", *arguments)
        assert code == 0, said
        return json.loads(self.printed)


@pytest.fixture
def run(world: World, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(world, capsys)


def test_it_is_listed_by_day_and_hour_and_shown_in_order(world: World, run: Command) -> None:
    world.store.root_id()
    assert run("list")[0] == 2  # no pipeline of this name has run
    world.minutes(3, 1, 61)
    world.run("live").all()

    assert run.json("list") == [{"time": "2013-01-01", "hours": 2, "files": 2, "messages": 3}]
    assert [each["messages"] for each in run.json("list", "--hours")] == [2, 1]
    assert [each["messages"] for each in run.json("list", *NINE_TO_TEN)] == [2]
    shown = run.json("show", *NINE_TO_TEN)
    assert [json.loads(each["payload"])["minute"] for each in shown] == [1, 3]
    assert "These are the first 1" in run("show", "--limit", "1", *NINE_TO_TEN)[1]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_file_is_imported_once_and_run_like_what_was_received(
    world: World, run: Command, tmp_path: Path, kind: str
) -> None:
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
    assert [int(each) for each in world.rows("again")] == [4, 5]


def test_payload_and_id_are_columns_of_the_file(world: World, run: Command, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    payload = json.dumps({"minute": 7})
    path.write_text(json.dumps({"key": "m7", "t": NINE.timestamp(), "body": payload}) + "\n")

    run.json("import", str(path), "--time", "t", "--payload", "body", "--id", "key")

    [shown] = run.json("show", *NINE_TO_TEN)
    assert (shown["message_id"], shown["payload"]) == ("m7", payload)


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ('{"a": 1}', ("--time", "at"), "row 1 has no column 'at'; it has ['a']"),
        ('{"at": ""}', ("--time", "at"), "row 1 has nothing in the column 'at'"),
        ('{"at": "noon"}', ("--time", "at"), "'noon' in the column 'at' is not a timestamp"),
        ("no json", ("--time", "at"), "line 1, is no JSON"),
        ("[1]", ("--time", "at"), "line 1, is no JSON object"),
        ("", ("--time", "at"), "has no rows"),
    ],
)
def test_a_file_whose_columns_do_not_fit_is_one_sentence_and_nothing_is_imported(
    world: World, run: Command, tmp_path: Path, text: str, arguments: tuple[str, ...], said: str
) -> None:
    good = json.dumps({"at": NINE.isoformat()}) + "\n" if text.startswith('{"at"') else ""
    path = tmp_path / "odd.jsonl"
    path.write_text(f"{text}\n{good}" if text else "")

    code, out = run("import", str(path), *arguments)

    assert code == 2
    assert said in out
    assert look(world.archive).messages == 0


@pytest.mark.parametrize(
    ("name", "data", "said"),
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
def test_a_file_that_cannot_be_read_as_it_is_said_to_be_is_one_sentence(
    world: World, run: Command, tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)

    code, out = run("import", str(path), "--time", "at")

    assert code == 2
    assert said in out
    assert "nothing was imported" in out
    assert look(world.archive).messages == 0


def test_a_file_of_a_spreadsheet_and_ids_that_are_no_unicode_are_imported(
    world: World, run: Command, tmp_path: Path
) -> None:
    sheet, odd = tmp_path / "sheet.csv", tmp_path / "odd.jsonl"
    sheet.write_bytes(b"\xef\xbb\xbfat,minute\r\n2013-01-01T09:00:00Z,1\r\n")
    odd.write_text('{"at": "2013-01-01T09:01:00Z", "id": "half \\ud83d"}\n')

    run.json("import", str(sheet), "--time", "at")
    run.json("import", str(odd), "--time", "at", "--id", "id")

    assert [each["message_id"] for each in run.json("show", *NINE_TO_TEN)][1] == "half \\ud83d"


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
def test_a_spreadsheet_may_say_its_times_as_seconds_or_by_iso_8601(
    world: World, run: Command, tmp_path: Path, written: str, read: datetime
) -> None:
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(f"at,minute\n{written},1\n")

    run.json("import", str(sheet), "--time", "at")

    hour = read.replace(minute=0, second=0, microsecond=0)
    around = ("--start", hour.isoformat(), "--end", (hour + timedelta(hours=1)).isoformat())
    assert [each["time"] for each in run.json("show", *around)] == [read.isoformat()]


def test_odd_files_are_refused(world: World, run: Command, tmp_path: Path) -> None:
    csv, other = tmp_path / "odd.csv", tmp_path / "odd.txt"
    csv.write_text("at,minute\n2013-01-01\n")
    other.write_text("x")
    assert "line 2, has not as many columns" in run("import", str(csv), "--time", "at")[1]
    assert "ends in none of" in run("import", str(other), "--time", "at")[1]
    broken = tmp_path / "odd.parquet"
    broken.write_text("x")
    assert "is no Parquet file" in run("import", str(broken), "--time", "at")[1]
    assert "cannot be read" in run("import", str(tmp_path / "none.csv"), "--time", "at")[1]


def test_what_is_exported_can_be_imported(world: World, run: Command, tmp_path: Path) -> None:
    world.minutes(3, 1, 61)
    world.run("live").all()
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
    assert [each["batch_id"] for each in other.sink("again")] == [
        each["batch_id"] for each in world.sink("again")
    ]


def test_what_failed_in_a_backfill_is_listed_with_its_reason(world: World, run: Command) -> None:
    world.send({"minute": 1, "fails": "process"})
    for run_id in ("one", "two"):
        world.run(run_id).all()
    assert "No failures of archive runs" in run("failed")[1]

    world.backfill("again")

    [failure] = run.json("failed")
    assert (failure["run_id"], failure["reason"], failure["stage"]) == ("again", "sour", "process")
    assert "sour" in run("failed")[1]


def test_what_is_purged_is_gone_and_told(world: World, run: Command) -> None:
    world.minutes(1, 2, 61)
    world.run("live").all()
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


def test_hours_past_their_time_are_removed_by_a_later_run(tmp_path: Path) -> None:
    world = World(tmp_path, archive={"keep": 3600.0})
    world.minutes(1)
    world.run("live").all()
    assert look(world.archive).messages == 1

    world.run("later").process()

    assert look(world.archive).messages == 0
    report = world.backfill("again")
    assert "some of it was removed, by retention" in "; ".join(report["notes"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--start", "noon", "--end", "2013-01-01"), "--start: expected a timestamp in ISO 8601"),
        (("--start", "2013-01-02", "--end", "2013-01-01"), "is to be before --end"),
    ],
)
def test_an_interval_that_is_none_is_refused(
    world: World, run: Command, arguments: tuple[str, ...], said: str
) -> None:
    world.minutes(1)
    world.run("live").process()
    code, out = run("show", *arguments)
    assert (code, said in out) == (2, True)
