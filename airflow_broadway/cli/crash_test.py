"""``airflow-broadway crash-test``: a pipeline and its sink, struck at every point."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from airflow_broadway.cli.output import CommandError, complain, one_line, say, say_json
from airflow_broadway.core.text import many
from airflow_broadway.testing.crashes import Case, Family, Result, Sums, UnsoundPipeline
from airflow_broadway.testing.crashes.report import report
from airflow_broadway.testing.crashes.users import CrashTest, function_of, pipeline_of

#: Seconds between two lines of progress; on a terminal it is one line that changes.
_PAUSE, _PAUSE_ON_TERMINAL = 10.0, 0.2


def crash_test(given: argparse.Namespace) -> int:
    """Put a pipeline to the test; 1 if a case failed."""
    # Tasks have folders of their own, and import from here all the same.
    sys.path[:] = [os.path.abspath(each) for each in ["", *sys.path]]
    test = CrashTest(
        pipeline=pipeline_of(given.pipeline),
        messages=_messages(given),
        sink=function_of(given.sink) if given.sink else None,
        prepare=function_of(given.prepare) if given.prepare else None,
        families=_families(given.families),
        share=given.share,
        pairs=given.pairs,
        seed=given.seed,
        jobs=given.jobs,
        only=given.only,
        keep=given.keep,
    )
    progress = _Progress()
    try:
        sums = test.run(on_cases=progress.begin, on_result=progress.add)
    except UnsoundPipeline as error:
        for line in error.tail:
            sys.stderr.write(f"  {one_line(line)}\n")
        complain(error)
        return 2
    finally:
        progress.end()
    if given.json:
        say_json(_json(sums, given))
    else:
        say(*report(sums, lambda case: _command(given, case)))
        if given.keep and sums.failures:
            folders = {str(Path(each.folder).parent) for each in sums.failures}
            say(f"The files of what failed are in {', '.join(folders)}.")
    return int(not sums.good)


def _messages(given: argparse.Namespace) -> list[bytes]:
    if given.messages is None:
        return [b"%d" % number for number in range(given.count)]
    lines = Path(given.messages).read_bytes().splitlines()
    found = [line for line in lines if line.strip()]
    if not found:
        raise CommandError(f"{given.messages} has no line that is not empty")
    return found


def _families(text: str) -> list[Family]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in set(Family)]
    if unknown:
        raise CommandError(f"--families takes {', '.join(Family)}; got: {unknown[0]!r}")
    return [Family(name) for name in dict.fromkeys(names)]


def _command(given: argparse.Namespace, case: Case) -> str:
    """What runs just one case again."""
    words = ["airflow-broadway", "crash-test", "--pipeline", given.pipeline]
    for name in ("sink", "prepare", "messages"):
        if getattr(given, name):
            words += [f"--{name}", getattr(given, name)]
    if given.messages is None and given.count != 12:
        words += ["--count", str(given.count)]
    return shlex.join([*words, "--only", str(case)])


def _json(sums: Sums, given: argparse.Namespace) -> dict[str, Any]:
    return {
        "points": len(sums.points),
        "cases": sums.cases,
        "runs": sums.runs,
        "lost": sums.lost,
        "missing": sums.missing,
        "repeated": sums.repeated,
        "unmarked": sums.unmarked,
        "left": sums.left,
        "mistakes": sums.mistakes,
        "unsteady": [str(each) for each in sums.unsteady],
        "parts": [
            {"stage": stage, "call": kind, **part} for (stage, kind), part in sums.parts.items()
        ],
        "failures": [
            {
                "case": str(each.case),
                "wrong": {kind.value: told for kind, told in each.wrong.items()},
                "again": _command(given, each.case),
                "folder": each.folder if given.keep else None,
            }
            for each in sums.failures
        ],
    }


class _Progress:
    """Says on standard error how far it is."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._cases = self._done = self._failed = 0
        self._said = time.monotonic()

    def begin(self, cases: int) -> None:
        self._cases = cases
        self._say(f"{many(cases, 'case')} to run")

    def add(self, result: Result) -> None:
        self._done += 1
        self._failed += not result.good
        now = time.monotonic()
        if now - self._said >= (_PAUSE_ON_TERMINAL if self._terminal else _PAUSE):
            self._said = now
            self._say(f"{self._done:,} of {many(self._cases, 'case')}, {self._failed:,} failed")

    def end(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\033[K")

    def _say(self, text: str) -> None:
        sys.stderr.write(f"\r\033[K{text}" if self._terminal else f"{text}\n")
        sys.stderr.flush()
