"""Errors and reports of ``airflow-broadway crash-test``; no case is run here."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest

from airflow_broadway.cli import crash_test as command
from airflow_broadway.cli.arguments import build_parser
from airflow_broadway.testing.crashes import users
from airflow_broadway.testing.crashes.account import Account, Violation
from airflow_broadway.testing.crashes.campaign import Totals, UnsoundPipeline
from airflow_broadway.testing.crashes.case import Case, Result
from airflow_broadway.testing.crashes.points import Injection
from airflow_broadway.testing.crashes.report import report
from airflow_broadway.testing.crashes.users import CrashTest
from tests.cli_runs import ran

Capsys = pytest.CaptureFixture[str]

MODULE = """
from airflow_broadway import Batcher, Broadway
from airflow_broadway.producers.sqlite import SqliteProducer

class Fine(Broadway):
    producer = SqliteProducer(queue="q", path="/given")

    def handle_message(self, processor, message, context):
        return message

class WithoutProducer(Fine):
    producer = None

class OnSpark(Fine):
    batchers = {"big": Batcher(engine="spark")}

def rows(folder):
    return []

number = 5
"""
CASE = Case.parse("one/process/1 return #1: killed before [next run, traffic]")


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crash_shop.py").write_text(MODULE)
    (tmp_path / "crash_broken.py").write_text("1 / 0")
    (tmp_path / "empty.txt").write_text("\n\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "crash_shop", raising=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("crash_shop", "a pipeline is named as module:Class"),
        ("crash_nowhere:Fine", "module 'crash_nowhere' cannot be imported"),
        ("crash_broken:Fine", "fails when it is imported: ZeroDivisionError"),
        ("crash_shop:Nope", "has no 'Nope'"),
        ("crash_shop:number", "is no subclass of airflow_broadway.Broadway"),
        ("crash_shop:WithoutProducer", "WithoutProducer has no producer"),
        ("crash_shop:Fine --sink rows", "a function is named as module:function"),
        ("crash_shop:Fine --sink crash_shop:nope", "cannot be imported: AttributeError"),
        ("crash_shop:Fine --sink crash_shop:number", "is no function"),
        ("crash_shop:Fine --prepare crash_shop:rows --jobs 2", "omit --jobs"),
        ("crash_shop:Fine --messages nowhere.txt", "No such file"),
        ("crash_shop:Fine --messages empty.txt", "no line that is not empty"),
        ("crash_shop:Fine --families crashes,floods", "got: 'floods'"),
        ("crash_shop:Fine --share 2", "a number from 0 to 1"),
        ("crash_shop:Fine --count 0", "at least 1"),
    ],
)
def test_what_cannot_be_put_to_the_test_is_told_in_one_line(
    capsys: Capsys, arguments: str, text: str
) -> None:
    result = ran(capsys, "crash-test", "--pipeline", *arguments.split())

    assert result.code == 2
    assert text in result.err
    assert result.err.count("\n") == 1


def test_a_spark_batcher_needs_spark(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "find_spec", lambda name: None)
    result = ran(capsys, "crash-test", "--pipeline", "crash_shop:OnSpark")
    assert (result.code, "pyspark is not installed here" in result.err) == (2, True)


def test_other_systems_than_linux_are_rejected(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    result = ran(capsys, "crash-test", "--pipeline", "crash_shop:Fine")
    assert (result.code, "needs Linux" in result.err) == (2, True)


def test_an_unsound_pipeline_is_reported_with_the_end_of_its_log(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(test: CrashTest, **_: object) -> Totals:
        error = UnsoundPipeline("failed without any fault: lost: a")
        error.tail = ["ValueError: no good"]
        raise error

    monkeypatch.setattr(CrashTest, "run", run)
    result = ran(capsys, "crash-test", "--pipeline", "crash_shop:Fine")

    assert result.code == 2
    assert "  ValueError: no good\n" in result.err
    assert result.err.endswith("failed without any fault: lost: a\n")


def test_the_repeat_command_runs_the_same_case() -> None:
    args = build_parser().parse_args(
        [
            "crash-test",
            "--pipeline",
            "a:B",
            "--sink",
            "a:rows",
            "--count",
            "3",
            "--share",
            "0.5",
            "--jobs",
            "2",
        ]
    )
    [program, *words] = shlex.split(command._repeat_command(args, CASE))

    repeated = build_parser().parse_args(words)
    assert program == "airflow-broadway"
    assert (repeated.pipeline, repeated.sink, repeated.count) == ("a:B", "a:rows", 3)
    assert [Case.parse(item) for item in repeated.only] == [CASE]


def test_a_report_has_a_row_for_each_stage_and_call_and_a_few_cases_of_each_failure() -> None:
    totals = Totals(points={CASE.injections[0].point})
    totals.parts = {
        ("process", "return"): Counter(cases=5, points=1, failed=5, repeated=25),
        ("ack", "COMMIT"): Counter(cases=4, points=1),
    }
    rows = [f"row {number} is there twice, and should be once" for number in range(5)]
    totals.failures = [Result(CASE, Account(violations={Violation.REPEATED: rows}), [], Path())] * 5
    totals.unsteady = [CASE.injections[0].point]

    lines = report(totals, lambda case: f"again {case}")

    assert [line.split() for line in lines[1:4]] == [
        ["process", "return", "1", "5", "5", "0", "0", "25", "0", "0", "0"],
        ["ack", "COMMIT", "1", "4", "0", "0", "0", "0", "0", "0", "0"],
        ["all", "2", "9", "5", "0", "0", "25", "0", "0", "0"],
    ]
    assert lines.count(f"      again {CASE}") == 3
    assert "    and 2 more" in lines
    assert "  and 2 cases more" in lines
    assert "Skipped: 1 call, made in some runs only" in "\n".join(lines)
    assert "  one/process/1 return #1" in lines
    assert lines[-1] == "9 cases at 1 point: 5 failed."


def test_an_injection_prints_as_it_is_parsed() -> None:
    assert (
        str(Injection.parse("one/ack/1 COMMIT #2: response lost"))
        == "one/ack/1 COMMIT #2: response lost"
    )
