"""``make faults``: kills tasks, brokers and network connections; explores all crash points.

Counts every message, and writes ``build/faults.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from scripts.airflow_env import ROOT, home_of
from tests.crashes.subjects import SUBJECTS
from tests.faults.backfills import BackfillCase, run_backfills
from tests.faults.brokers import BROKERS
from tests.faults.case_result import CaseResult
from tests.faults.requeues import RequeueCase, run_requeue_case
from tests.faults.runs import RunCase, run_case
from tests.nothing_left import nothing_left_behind
from tests.traffic.cases import traffic_cases

BUILD = ROOT / "build"

#: Default number of task kills, by broker; a kill takes about 20 s.  Brokers whose settlement has
#: more steps get more kills.
KILLS = {"rabbitmq": 8, "kafka": 8}
FEW_KILLS = 6
#: Default number of runs of each traffic case; a run takes about 1 s.
TRAFFIC_RUNS = 24
#: Default duration, in seconds, of the preemption case, in which every run is killed.
PREEMPTED = {"rabbitmq": 600.0}
FEW_PREEMPTED = 60.0
#: Messages of the case without kills, and of the backfill case.
NORMAL = 2_000
#: Dead letters of the requeue case, and kills of its command.
LETTERS, LETTER_KILLS = 1_000, 5


def main() -> int:
    """Runs the cases; returns 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--broker", choices=sorted(BROKERS), action="append", help="only this broker"
    )
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument(
        "--kills", type=int, help="task kills per broker; default 6, RabbitMQ and Kafka 8"
    )
    parser.add_argument("--seed", type=int, default=_day_number(), help="default: the day")
    parser.add_argument("--runs", type=int, default=TRAFFIC_RUNS, help="runs of each traffic case")
    parser.add_argument(
        "--preempted",
        type=float,
        help="duration of the preemption case in seconds; default 60, RabbitMQ 600; 0: skip it",
    )
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    campaign_started = time.monotonic()
    results: list[CaseResult] = []
    brokers = arguments.broker or list(BROKERS)
    points = _CrashPointThread(
        (
            subject
            for subject in SUBJECTS
            if subject.split()[0] in brokers and arguments.case in f"points: {subject}"
        ),
        arguments.seed,
    )
    points.start()
    for broker in brokers:
        folder = BUILD / "faults" / broker
        shutil.rmtree(folder, ignore_errors=True)
        for name, messages, run in _iter_cases(broker, folder, arguments):
            if arguments.case not in name:
                continue
            print(f"{name}: {messages} messages" if messages else name, flush=True)
            started = time.monotonic()
            results.append(_run_safely(name, messages, run))
            _print_result(results[-1], time.monotonic() - started)
            _write(results, points.reports)
    points.join()
    _write(results, points.reports)
    _print_point_totals(points.reports)
    print(f"finished in {(time.monotonic() - campaign_started) / 60:.0f} minutes", flush=True)
    # A crash point that only some runs reach ("unsteady") was not tested: that is a gap.
    failed = any(report["failures"] or report.get("unsteady") for report in points.reports)
    return int(failed or not all(case.passed for case in results))


def _day_number() -> int:
    """Returns the number of the day, so that each day's campaign tests other cases."""
    return datetime.now(UTC).toordinal()


class _CrashPointThread(threading.Thread):
    """Explores the crash points of each subject while the main thread mostly waits for Airflow.

    :param subjects: The subjects' names.
    """

    def __init__(self, subjects: Iterable[str], seed: int) -> None:
        # A daemon thread: Ctrl-C does not wait for it.
        super().__init__(name="points", daemon=True)
        self._pending = list(subjects)
        self._seed = seed
        #: The report of each pipeline.
        self.reports: list[dict[str, Any]] = []

    def run(self) -> None:
        while self._pending:
            subject = self._pending[0]
            print(f"points: {subject}", flush=True)
            self.reports += self._explore(subject)
            del self._pending[0]

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        self.reports += [_incomplete_report(subject) for subject in self._pending]

    def _explore(self, subject: str) -> list[dict[str, Any]]:
        """Runs the explorer in a process of its own: it forks, so it may have no threads."""
        report = BUILD / "faults" / f"points-{subject.replace(' ', '-')}.json"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "tests.crashes", "--broker", subject, "--report", str(report))
        ]
        subprocess.run([*command, "--seed", str(self._seed)], cwd=ROOT, check=False)
        if not report.exists():
            return [_incomplete_report(subject)]
        reports: list[dict[str, Any]] = json.loads(report.read_text())
        return reports


def _incomplete_report(subject: str) -> dict[str, Any]:
    return {"broker": subject, "failures": [["the campaign did not finish"]]}


def _print_point_totals(points: list[dict[str, Any]]) -> None:
    """Prints the totals of the crash points, one line per broker."""
    counts = ("points", "cases", "runs", "lost", "unmarked", "left", "mistakes")
    for broker in dict.fromkeys(point["broker"] for point in points):
        reports = [point for point in points if point["broker"] == broker]
        sums = (f"{sum(report.get(name, 0) for report in reports):,} {name}" for name in counts)
        print(f"{broker}: {', '.join(sums)}", flush=True)


def _iter_cases(
    broker: str, folder: Path, arguments: argparse.Namespace
) -> Iterator[tuple[str, int, Callable[[], CaseResult]]]:
    """Yields each case's name, number of messages (0: known only at its end), and function."""
    kills = KILLS.get(broker, FEW_KILLS) if arguments.kills is None else arguments.kills
    case = RunCase(
        broker=broker,
        messages=arguments.messages,
        kills=kills,
        seed=arguments.seed,
        folder=folder / "runs",
        home=home_of(ROOT, "airflow-faults"),
        log=lambda line: print(line, flush=True),
    )
    normal = replace(case, kills=0, messages=NORMAL, folder=folder / "normal")
    yield normal.name, normal.messages, lambda: run_case(normal)
    if kills:
        yield case.name, case.messages, lambda: run_case(case)
        yield from _requeue_and_backfill_cases(case, folder)
    seconds = (
        PREEMPTED.get(broker, FEW_PREEMPTED) if arguments.preempted is None else arguments.preempted
    )
    yield from traffic_cases(
        broker, folder, arguments.case, arguments.runs, arguments.seed, seconds
    )
    if broker == "rabbitmq":
        from tests.faults.rabbitmq_campaign import rabbitmq_cases

        yield from rabbitmq_cases(folder, arguments.case)


def _requeue_and_backfill_cases(
    case: RunCase, folder: Path
) -> Iterator[tuple[str, int, Callable[[], CaseResult]]]:
    """Yields the cases that kill a requeue of dead letters, and archive and backfill runs."""
    requeues = RequeueCase(
        broker=case.broker,
        letters=LETTERS,
        kills=LETTER_KILLS,
        seed=case.seed,
        folder=folder / "requeue",
        log=case.log,
    )
    yield requeues.name, requeues.letters, lambda: run_requeue_case(requeues)
    if case.broker == "sqlite":
        backfills = BackfillCase(
            messages=NORMAL,
            seed=case.seed,
            folder=folder / "backfills",
            home=case.home,
            log=case.log,
        )
        yield backfills.name, backfills.messages, lambda: run_backfills(backfills)


def _run_safely(name: str, messages: int, run: Callable[[], CaseResult]) -> CaseResult:
    """Runs a case; an exception becomes a mistake, so that the next cases still run."""
    try:
        return run()
    except (Exception, pytest.fail.Exception) as error:
        text = " ".join(str(error).split())
        return CaseResult(name, messages, mistakes=[f"{type(error).__name__}: {text[:500]}"])


def _print_result(result: CaseResult, seconds: float) -> None:
    fields = result.to_json()
    deleted = f"; {result.reported_lost} reported as deleted by an operator"
    killed = f"; {fields['kills']} kills ({dict(result.killed)})"
    print(
        f"{fields['name']}: {fields['lost']} lost, {fields['duplicates']} duplicates,"
        f" {fields['unmarked']} of them unmarked{killed if result.killed else ''}"
        f"{deleted if result.reported_lost else ''}, in {seconds:.0f} s",
        flush=True,
    )
    if result.lost:
        print(f"  lost: {result.lost[:20]}")
    for mistake in result.mistakes:
        print(f"  {mistake}", flush=True)


def _write(results: list[CaseResult], points: list[dict[str, Any]]) -> None:
    path = BUILD / "faults.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"cases": [case.to_json() for case in results], "points": points}
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    with nothing_left_behind():
        sys.exit(main())
