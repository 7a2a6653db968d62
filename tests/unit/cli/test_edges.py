"""The command line at its limits: the fifty-first run, the second portion, a long message."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow import settings
from airflow.dag_processing.bundles.base import BaseDagBundle

from airflow_broadway.cli import runs as command
from airflow_broadway.cli.arguments import build_parser
from airflow_broadway.cli.output import logging_at, only_results_on_stdout, print_lines
from airflow_broadway.core.formats import paths
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.runs.reading.runs import list_runs
from tests.cli_runs import RUN_ID, make_shop, ran


@pytest.fixture
def shop(tmp_path, monkeypatch):
    new = make_shop(tmp_path, monkeypatch)
    new.send([{"n": n, "shop": "ab"[n % 2]} for n in range(4)])
    return new


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands and of their actions."""
    groups = argparse._SubParsersAction
    nested = [action for action in parser._actions if isinstance(action, groups)]
    if not nested:
        yield parser
    for action in nested:
        for choice in action.choices.values():
            yield from commands(choice)


def test_all_commands_take_json():
    all_commands = list(commands(build_parser()))

    assert len(all_commands) >= 12
    for parser in all_commands:
        assert "--json" in parser._option_string_actions, parser.prog


def test_only_results_go_to_standard_output(capsys):
    with only_results_on_stdout(), logging_at(logging.INFO):
        print("a callback prints")
        logging.getLogger("spark").info("a library logs")
        print_lines("the result")

    output = capsys.readouterr()
    assert output.out == "the result\n"
    assert "a callback prints" in output.err
    assert "a library logs" in output.err


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [50, 51])
def test_fifty_runs_are_listed_by_default(shop, capsys, monkeypatch, count):
    shop.process()
    [summary], _ = list_runs(shop.run().store)
    many = [dataclasses.replace(summary, run_id=f"run-{number:02}") for number in range(count)]
    monkeypatch.setattr(command, "list_runs", lambda *_, newest, **__: (many[-newest:], len(many)))

    lines = ran(capsys, "runs").out.splitlines()

    listed = [line.split()[3] for line in lines if "run-" in line and "limit" not in line]
    assert listed == [f"run-{number:02}" for number in range(count - 50, count)]
    assert (lines[-1] == "These are the 50 newest of 51: --limit 51 shows all.") is (count > 50)


def test_run_state_is_that_of_its_least_advanced_generation(shop, capsys):
    def state():
        [listed] = ran(capsys, "runs", "--json").json
        return str(listed["state"])

    # Given a settled run, which then goes on by one generation after another
    run = shop.settled_run()
    assert state() == "settled"
    [first] = run.generations()

    def opened(index):
        lease = dataclasses.replace(run.lease(first), generation=f"{index}" * 32)
        run.open_generation(lease=lease, task_id="process", map_index=index, try_number=1)
        return lease.generation

    run.files.create(paths.intent(opened(1)), "{}")
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
def test_failed_runs_are_listed_with_the_reason(shop, capsys, changes, why):
    run = shop.settled_run()
    report = json.loads(run.files.read("report.json"))
    for name, value in changes.items():
        part = report["totals"] if name in report["totals"] else report
        part[name] = value
    run.files.replace("report.json", json.dumps(report))

    text = ran(capsys, "runs", "--failed").out
    listed = ran(capsys, "runs", "--failed", "--json").json

    assert [row["run_id"] for row in listed] == ([RUN_ID] if why else [])
    if why is None:
        assert text.startswith("No runs that need looking at")
    else:
        assert f"{RUN_ID}: {why}" in text


class FetchedBundle(BaseDagBundle):
    """A bundle that is a folder only once it has been fetched, as that of a git repository is."""

    def __init__(self, *, source: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._source = source

    @property
    def path(self) -> Path:
        return Path(self.base_dir) / "fetched"

    def initialize(self) -> None:
        shutil.copytree(self._source, self.path)
        super().initialize()

    def get_current_version(self) -> None:
        return None

    def refresh(self) -> None: ...


@pytest.mark.parametrize("bundles", [(), ("gone", "shop"), ("gone",)])
def test_pipeline_next_to_dag_files_is_importable(shop, capsys, monkeypatch, tmp_path, bundles):
    # Given a process that has neither the module nor its folder
    monkeypatch.setattr(sys, "path", [path for path in sys.path if str(shop.folder) not in path])
    monkeypatch.delitem(sys.modules, shop.module, raising=False)
    # Airflow's processes have it from the folder of Dags, or from a bundle
    monkeypatch.setattr(settings, "DAGS_FOLDER", f"{shop.folder}/dags")
    if bundles:
        monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH", str(tmp_path / "b"))
        source = {"gone": "/nowhere", "shop": f"{shop.folder}/dags"}
        path = f"{__name__}.FetchedBundle"
        configured = [
            {"name": name, "classpath": path, "kwargs": {"source": source[name]}}
            for name in bundles
        ]
        setting = "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST"
        monkeypatch.setenv(setting, json.dumps(configured))

    result = ran(capsys, "depth", "--pipeline", shop.ref, "--json")

    if bundles == ("gone",):
        assert "Dag bundle 'gone' cannot be fetched" in result.json[0]["unknown"]
    else:
        assert [row["ready"] for row in result.json] == [4]
        assert result.code == 0


# -- queue -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("good", "sent"), [(5_000, 5_000), (4_999, 0)])
def test_send_that_fails_midway_reports_how_many_were_sent(
    tmp_path, capsys, monkeypatch, good, sent
):
    # Given lines of which the first that is too long is the last
    monkeypatch.setattr("airflow_broadway.producers.sqlite.queue.MAX_BODY", 1000)
    (tmp_path / "lines").write_bytes(b"a\n" * good + b"x" * 1001)

    place = ("--path", str(tmp_path / "queue.db"), "--queue", "orders")
    result = ran(capsys, "queue", "send", *place, str(tmp_path / "lines"))

    # Then those of the transactions before it are sent, and counted in the error
    assert ("sent 5,000 messages, then: " in result.error) is bool(sent)
    assert "its body has 1001 bytes" in result.error
    with SqliteQueue(tmp_path / "queue.db", "orders") as opened:
        assert opened.depth().ready == sent
