"""``make faults``: kill tasks, brokers and networks, then strike each point at which a run touches
the world; count every message; build/faults.json.
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
from tests.faults.brokers import BROKERS
from tests.faults.found import Found
from tests.faults.past_runs import Past, run_past
from tests.faults.requeues import Requeues, run_requeues
from tests.faults.runs import Case, run_case
from tests.living.cases import living_cases
from tests.nothing_left import nothing_left_behind

BUILD = ROOT / "build"

#: Kills of a broker's runs, where not given, a third of a minute each: most where custody has the
#: most steps to die between.  A night may have more, by ``--kills``.
KILLS = {"rabbitmq": 8, "kafka": 8}
FEW_KILLS = 6
#: Runs of each living case, where not given; a second each.
LIVING_RUNS = 24
#: Seconds for which runs are killed from outside, where not given, at such a rate that none ends
#: untouched.
PREEMPTED = {"rabbitmq": 600.0}
FEW_PREEMPTED = 60.0
#: Messages of runs without kills, and of those that are backfilled.
NORMAL = 2_000
#: Dead letters that are requeued by a killed command, and how often it is killed.
LETTERS, LETTER_KILLS = 1_000, 5


def main() -> int:
    """Runs the cases; returns 1 if a message was lost, or repeated without a mark."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--broker", choices=sorted(BROKERS), action="append", help="only this one")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument(
        "--kills", type=int, help="of tasks; 6, and 8 at RabbitMQ and Kafka; 0: none"
    )
    parser.add_argument("--seed", type=int, default=_today(), help="else the day's")
    parser.add_argument(
        "--runs", type=int, default=LIVING_RUNS, help="of each living case, in traffic"
    )
    parser.add_argument(
        "--preempted",
        type=float,
        help="seconds of kills from outside; 60, and 600 at RabbitMQ; 0: none",
    )
    parser.add_argument("--case", default="", help="only cases whose name has this in it")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    began = time.monotonic()
    results: list[Found] = []
    brokers = arguments.broker or list(BROKERS)
    points = _Points(
        (
            subject
            for subject in SUBJECTS
            if subject.split()[0] in brokers and _wanted(subject, arguments.case)
        ),
        arguments.seed,
    )
    points.start()
    for broker in brokers:
        folder = BUILD / "faults" / broker
        shutil.rmtree(folder, ignore_errors=True)
        for name, messages, run in _cases_of(broker, folder, arguments):
            if arguments.case not in name:
                continue
            print(f"{name}: {messages} messages" if messages else name, flush=True)
            started = time.monotonic()
            results.append(_tried(name, messages, run))
            _tell(results[-1], time.monotonic() - started)
            _write(results, points.told)
    points.join()
    _write(results, points.told)
    _tell_points(points.told)
    print(f"all in {(time.monotonic() - began) / 60:.0f} minutes", flush=True)
    # A point that is not there in every run was not struck: the campaign has a gap.
    bad = any(report["failures"] or report.get("unsteady") for report in points.told)
    return int(bad or not all(case.good for case in results))


def _today() -> int:
    """The number of this day: from one to the next the campaign goes on to other cases."""
    return datetime.now(UTC).toordinal()


class _Points(threading.Thread):
    """Strikes every point of each subject, one after another, next to the random kills: those
    mostly waits for Airflow.

    :param subjects: Their names.
    """

    def __init__(self, subjects: Iterable[str], seed: int) -> None:
        # A daemon, so that an interrupt does not wait for it.
        super().__init__(name="points", daemon=True)
        self._left = list(subjects)
        self._seed = seed
        #: What came of each pipeline.
        self.told: list[dict[str, Any]] = []

    def run(self) -> None:
        while self._left:
            subject = self._left[0]
            print(f"points: {subject}", flush=True)
            self.told += self._strike(subject)
            del self._left[0]

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        self.told += [_no_end(subject) for subject in self._left]

    def _strike(self, subject: str) -> list[dict[str, Any]]:
        """In a program of its own, which forks, and so has no threads."""
        report = BUILD / "faults" / f"points-{subject.replace(' ', '-')}.json"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
        line = [sys.executable, "-m", "tests.crashes", "--broker", subject, "--report", str(report)]
        subprocess.run([*line, "--seed", str(self._seed)], cwd=ROOT, check=False)
        if not report.exists():
            return [_no_end(subject)]
        reports: list[dict[str, Any]] = json.loads(report.read_text())
        return reports


def _no_end(subject: str) -> dict[str, Any]:
    return {"broker": subject, "failures": [["the campaign itself came to no end"]]}


def _wanted(subject: str, case: str) -> bool:
    return case in f"points: {subject}"


def _tell_points(points: list[dict[str, Any]]) -> None:
    """Say what was struck, a broker a line."""
    counts = ("points", "cases", "runs", "lost", "unmarked", "left", "mistakes")
    for broker in dict.fromkeys(point["broker"] for point in points):
        of = [point for point in points if point["broker"] == broker]
        sums = (f"{sum(point.get(name, 0) for point in of):,} {name}" for name in counts)
        print(f"{broker}: {', '.join(sums)}", flush=True)


def _cases_of(
    broker: str, folder: Path, given: argparse.Namespace
) -> Iterator[tuple[str, int, Callable[[], Found]]]:
    """Yields each case's name, messages (0: the case counts them), and its function."""
    kills = KILLS.get(broker, FEW_KILLS) if given.kills is None else given.kills
    case = Case(
        broker=broker,
        messages=given.messages,
        kills=kills,
        seed=given.seed,
        folder=folder / "runs",
        home=home_of(ROOT, "airflow-faults"),
        tell=lambda line: print(line, flush=True),
    )
    normal = replace(case, kills=0, messages=NORMAL, folder=folder / "normal")
    yield normal.name, normal.messages, lambda: run_case(normal)
    if kills:
        yield case.name, case.messages, lambda: run_case(case)
        yield from _of_the_past(case, folder)
    seconds = PREEMPTED.get(broker, FEW_PREEMPTED) if given.preempted is None else given.preempted
    yield from living_cases(broker, folder, given.case, given.runs, given.seed, seconds)
    if broker == "rabbitmq":
        from tests.faults.rabbitmq_all import rabbitmq_cases

        yield from rabbitmq_cases(folder, given.case)


def _of_the_past(case: Case, folder: Path) -> Iterator[tuple[str, int, Callable[[], Found]]]:
    """Yields cases that are killed while they requeue dead letters, or keep or rerun an archive."""
    requeues = Requeues(
        broker=case.broker,
        letters=LETTERS,
        kills=LETTER_KILLS,
        seed=case.seed,
        folder=folder / "requeue",
        tell=case.tell,
    )
    yield requeues.name, requeues.letters, lambda: run_requeues(requeues)
    if case.broker == "sqlite":
        past = Past(
            messages=NORMAL, seed=case.seed, folder=folder / "past", home=case.home, tell=case.tell
        )
        yield past.name, past.messages, lambda: run_past(past)


def _tried(name: str, messages: int, run: Callable[[], Found]) -> Found:
    """A case; what it raises is a mistake, and the others are run all the same."""
    try:
        return run()
    except (Exception, pytest.fail.Exception) as error:
        text = " ".join(str(error).split())
        return Found(name, messages, mistakes=[f"{type(error).__name__}: {text[:500]}"])


def _tell(found: Found, seconds: float) -> None:
    fields = found.to_json()
    deleted = f"; {found.told_lost} deleted by an operator, and told" if found.told_lost else ""
    killed = f"; {fields['kills']} kills ({dict(found.killed)})" if found.killed else ""
    print(
        f"{fields['name']}: {fields['lost']} lost, {fields['duplicates']} handled again, of these"
        f" {fields['unmarked']} unmarked{killed}{deleted}, in {seconds:.0f} s",
        flush=True,
    )
    if found.lost:
        print(f"  lost: {found.lost[:20]}")
    for mistake in found.mistakes:
        print(f"  {mistake}", flush=True)


def _write(found: list[Found], points: list[dict[str, Any]]) -> None:
    path = BUILD / "faults.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"cases": [case.to_json() for case in found], "points": points}
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    with nothing_left_behind():
        sys.exit(main())
