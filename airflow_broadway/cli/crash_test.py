"""``airflow-broadway crash-test``: injects crashes and faults into a pipeline's external calls."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from airflow_broadway.cli.output import CommandError, Result
from airflow_broadway.core.text import pluralize, printable
from airflow_broadway.testing.crashes.campaign import Family, Totals, UnsoundPipeline
from airflow_broadway.testing.crashes.case import Case
from airflow_broadway.testing.crashes.case import Result as CaseResult
from airflow_broadway.testing.crashes.report import report
from airflow_broadway.testing.crashes.users import CrashTest, function_of, pipeline_of

#: Seconds between two lines of progress; on a terminal one line is updated.
_INTERVAL, _INTERVAL_ON_TERMINAL = 10.0, 0.2


def crash_test(args: argparse.Namespace) -> Result:
    """Runs the crash test of a pipeline; the exit code is 1 if a case failed."""
    # Tasks change their working folder: relative entries must still resolve.
    sys.path[:] = [os.path.abspath(path) for path in ["", *sys.path]]
    test = CrashTest(
        pipeline=pipeline_of(args.pipeline),
        messages=_read_messages(args),
        sink=function_of(args.sink) if args.sink else None,
        prepare=function_of(args.prepare) if args.prepare else None,
        families=_parse_families(args.families),
        share=args.share,
        pairs=args.pairs,
        seed=args.seed,
        jobs=args.jobs,
        only=args.only,
        keep=args.keep,
    )
    progress = _Progress()
    try:
        totals = test.run(on_cases=progress.begin, on_result=progress.add)
    except UnsoundPipeline as error:
        for line in error.tail:
            sys.stderr.write(f"  {printable(line)}\n")
        raise
    finally:
        progress.end()
    lines = report(totals, lambda case: _repeat_command(args, case))
    if args.keep and totals.failures:
        folders = {str(failure.folder.parent) for failure in totals.failures}
        lines.append(f"The files of failed cases are in {', '.join(folders)}.")
    return Result(_to_json(totals, args), lines, int(not totals.passed))


def _read_messages(args: argparse.Namespace) -> list[bytes]:
    if args.messages is None:
        return [b"%d" % number for number in range(args.count)]
    lines = Path(args.messages).read_bytes().splitlines()
    messages = [line for line in lines if line.strip()]
    if not messages:
        raise CommandError(f"{args.messages} has no line that is not empty")
    return messages


def _parse_families(text: str) -> list[Family]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in set(Family)]
    if unknown:
        raise CommandError(f"--families takes {', '.join(Family)}; got: {unknown[0]!r}")
    return [Family(name) for name in dict.fromkeys(names)]


def _repeat_command(args: argparse.Namespace, case: Case) -> str:
    """Returns the command line that repeats one case."""
    words = ["airflow-broadway", "crash-test", "--pipeline", args.pipeline]
    for name in ("sink", "prepare", "messages"):
        if getattr(args, name):
            words += [f"--{name}", getattr(args, name)]
    if args.messages is None and args.count != 12:
        words += ["--count", str(args.count)]
    return shlex.join([*words, "--only", str(case)])


def _to_json(totals: Totals, args: argparse.Namespace) -> dict[str, Any]:
    counts = totals.counts
    return {
        "points": len(totals.points),
        "cases": counts["cases"],
        "runs": totals.runs,
        **{name: counts[name] for name in ("lost", "missing", "repeated", "unmarked", "left")},
        "mistakes": counts["other"],
        "unsteady": [str(case) for case in totals.unsteady],
        "parts": [
            {"stage": stage, "call": kind, **part} for (stage, kind), part in totals.parts.items()
        ],
        "failures": [
            {
                "case": str(failure.case),
                "wrong": {
                    kind.value: details for kind, details in failure.account.violations.items()
                },
                "again": _repeat_command(args, failure.case),
                "folder": str(failure.folder) if args.keep else None,
            }
            for failure in totals.failures
        ],
    }


class _Progress:
    """Reports progress on standard error."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._cases = ""
        self._done = self._failed = 0
        self._reported_at = time.monotonic()

    def begin(self, cases: int) -> None:
        self._cases = pluralize(cases, "case")
        self._print(f"{self._cases} to run")

    def add(self, result: CaseResult) -> None:
        self._done += 1
        self._failed += not result.passed
        now = time.monotonic()
        if now - self._reported_at >= (_INTERVAL_ON_TERMINAL if self._terminal else _INTERVAL):
            self._reported_at = now
            self._print(f"{self._done:,} of {self._cases}, {self._failed:,} failed")

    def end(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\033[K")

    def _print(self, text: str) -> None:
        sys.stderr.write(f"\r\033[K{text}" if self._terminal else f"{text}\n")
        sys.stderr.flush()
