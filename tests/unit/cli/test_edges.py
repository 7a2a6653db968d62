"""The command line at its limits: the fifty-first run, the second portion, a held message."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.cli import runs as command
from airflow_broadway.cli.arguments import build_parser
from airflow_broadway.cli.output import logging_at, only_results_on_stdout, print_lines
from airflow_broadway.core.formats import paths
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.runs.reading.runs import list_runs
from tests.cli_runs import RUN_ID, Shop, make_shop, ran

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    made = make_shop(tmp_path, monkeypatch)
    made.send([{"n": n, "shop": "ab"[n % 2]} for n in range(4)])
    return made


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands and of their actions."""
    nested = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not nested:
        yield parser
    for action in nested:
        for each in action.choices.values():
            yield from commands(each)


def test_every_command_takes_json() -> None:
    found = list(commands(build_parser()))

    assert len(found) >= 12
    for each in found:
        assert "--json" in each._option_string_actions, each.prog


def test_results_go_to_standard_output_and_all_else_to_standard_error(capsys: Capsys) -> None:
    with only_results_on_stdout(), logging_at(logging.INFO):
        print("a callback prints")
        logging.getLogger("spark").info("a library logs")
        print_lines("the result")

    told = capsys.readouterr()
    assert told.out == "the result\n"
    assert "a callback prints" in told.err
    assert "a library logs" in told.err


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "shown"), [(50, 50), (51, 50)])
def test_fifty_runs_are_listed_unless_told_otherwise(
    shop: Shop, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, count: int, shown: int
) -> None:
    shop.process()
    [summary] = list_runs(shop.run().store)
    many = [dataclasses.replace(summary, run_id=f"run-{number:02}") for number in range(count)]
    monkeypatch.setattr(command, "list_runs", lambda *_, **__: many)

    lines = ran(capsys, "runs").out.splitlines()

    listed = [line.split()[3] for line in lines if "run-" in line and "limit" not in line]
    assert listed == [f"run-{number:02}" for number in range(count - shown, count)]
    assert (lines[-1] == "These are the 50 newest of 51: --limit 51 shows all.") is (count > 50)


def test_the_state_of_a_run_is_that_of_its_generation_furthest_behind(
    shop: Shop, capsys: Capsys
) -> None:
    def state() -> str:
        [listed] = ran(capsys, "runs", "--json").json
        return str(listed["state"])

    # Given a settled run, which then goes on by one generation after another
    run = shop.settled_run()
    assert state() == "settled"
    [first] = run.generations()

    def opened(index: int) -> str:
        lease = dataclasses.replace(run.lease(first), generation=f"{index}" * 32)
        run.open_generation(lease=lease, task_id="process", map_index=index, try_number=1)
        return lease.generation

    settling = opened(1)
    run.files.create(paths.intent(settling), "{}")
    assert state() == "settling"

    # When one more has published, and one only begun
    shop.send([{"n": 9, "shop": "a"}])
    shop.process()
    assert state() == "published"
    opened(2)
    assert state() == "open"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"balanced": False}, "the sum does not balance"),
        ({"failed_tasks": ["broadway.batch.b"]}, "tasks failed: broadway.batch.b; fix"),
        ({"lapsed": 1}, "1 message had lapsed before they were settled"),
        ({"settle_failed": 1}, "1 could not be settled"),
        ({"failed": 3}, None),
        ({"failed": 4}, "4 messages failed, every message that was handled"),
    ],
)
def test_what_needs_looking_at_is_listed_with_its_reason(
    shop: Shop, capsys: Capsys, changes: dict[str, Any], why: str | None
) -> None:
    run = shop.settled_run()
    report = json.loads(run.files.read("report.json"))
    for name, value in changes.items():
        part = report["totals"] if name in report["totals"] else report
        part[name] = value
    run.files.replace("report.json", json.dumps(report))

    text = ran(capsys, "runs", "--failed").out
    listed = ran(capsys, "runs", "--failed", "--json").json

    assert [each["run_id"] for each in listed] == ([RUN_ID] if why else [])
    if why is None:
        assert text.startswith("No runs that need looking at")
    else:
        assert f"{RUN_ID}: {why}" in text


def test_a_pipeline_beside_dag_files_is_found_as_airflow_finds_it(
    shop: Shop, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a process that has neither the module nor its folder
    monkeypatch.setattr(sys, "path", [each for each in sys.path if str(shop.folder) not in each])
    monkeypatch.delitem(sys.modules, shop.module, raising=False)

    done = ran(capsys, "depth", "--pipeline", shop.ref, "--json")

    assert done.code == 0
    assert [row["ready"] for row in done.json] == [4]


# -- queue -----------------------------------------------------------------------------------------


@pytest.fixture
def queue(tmp_path: Path) -> list[str]:
    return ["--path", str(tmp_path / "queue.db"), "--queue", "orders"]


@pytest.mark.parametrize(("good", "sent"), [(5_000, 5_000), (4_999, 0)])
def test_a_send_that_fails_midway_says_how_many_were_sent(
    tmp_path: Path,
    capsys: Capsys,
    queue: list[str],
    monkeypatch: pytest.MonkeyPatch,
    good: int,
    sent: int,
) -> None:
    # Given lines of which the first that is too long is the last
    monkeypatch.setattr("airflow_broadway.producers.sqlite.queue.MAX_BODY", 1000)
    (tmp_path / "lines").write_bytes(b"a\n" * good + b"x" * 1001)

    done = ran(capsys, "queue", "send", *queue, str(tmp_path / "lines"))

    # Then those of the transactions before it are sent, and that is told
    assert ("sent 5,000 messages, then: " in done.error) is bool(sent)
    assert "its body has 1001 bytes" in done.error
    with SqliteQueue(tmp_path / "queue.db", "orders") as opened:
        assert opened.depth().ready == sent
