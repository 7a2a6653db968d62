"""An archive, and backfills of it, whose tasks are killed at random times in a real Airflow.

Live runs are killed while they put messages into the archive, a run of the dead letters while it
sends them back, and two backfills over what these have written in each of their tasks.
"""

from __future__ import annotations

import json
import random
import time
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.staging.archive.reader import look, tables
from airflow_broadway.staging.archive.table import archive_folder
from airflow_broadway.staging.store import Store
from scripts.airflow_env import airflow_env
from scripts.local_airflow import FINISHED, LocalAirflow, free_port
from tests.faults.brokers_sqlite import Sqlite
from tests.faults.dags import kept_pipeline as truth
from tests.faults.found import Found
from tests.faults.killing import KINDS, PATIENCE, Killer, kill, victims
from tests.faults.runs import DAGS, SETTINGS

_DAG = "kept"
#: Of the live runs after the first, that each may be killed while it publishes.
_LIVE_RUNS = 4
#: How often the same is run for a task that was too quick to be killed.
_AT_MOST = 4


@dataclass(frozen=True, kw_only=True)
class Past:
    """A case of archive and backfills, with its kills.

    :param kills: Kinds of task that die in the first live run, in the run of the dead letters, and
        in each of the two backfills; one of the live runs dies while it publishes, too.
    """

    messages: int
    seed: int
    folder: Path
    home: Path
    kills: Sequence[Sequence[str]] = (
        ("process", "batch"),
        ("process",),
        ("process", "process", "batch", "ack"),
        ("process", "batch"),
    )
    tell: Callable[[str], None] = print

    @property
    def name(self) -> str:
        return "sqlite.past"


def run_past(case: Past) -> Found:
    """Runs it in an Airflow of its own."""
    case.folder.mkdir(parents=True, exist_ok=True)
    queue = Sqlite(case.folder)
    settings = {**SETTINGS, "broadway.staging": f"file://{case.folder / 'staging'}"}
    env = airflow_env(home=case.home, dags=DAGS, port=free_port(8180), settings=settings)
    try:
        with LocalAirflow({**env, **queue.variables()}, case.folder / "airflow") as airflow:
            return _Past(case, queue, airflow).execute()
    finally:
        queue.close()


class _Past:
    def __init__(self, case: Past, queue: Sqlite, airflow: LocalAirflow) -> None:
        self._case = case
        self._queue = queue
        self._airflow = airflow
        self._rows = case.folder / "rows"
        self._found = Found(case.name, case.messages)
        self._killer = Killer(airflow, _DAG, random.Random(case.seed), self._struck)
        self._archive = archive_folder(Store.open(f"file://{case.folder / 'staging'}"), "Kept")

    def execute(self) -> Found:
        self._airflow.wait_for_dag(_DAG, timeout=120)
        self._killer.end_leftovers()
        live, letters, first, second = self._case.kills
        self._queue.send([b"%d" % number for number in range(self._case.messages)])
        everything = set(range(self._case.messages))
        handled = {number for number in everything if not truth.refused(number)}

        self._live(live)
        self._check_archive(copies=1)
        self._check_rows("live runs", handled)
        self._run("dead letters", letters, {"source": "dead_letters"})
        self._check_rows("the run of the dead letters", everything)
        if self._queue.dead() or self._queue.waiting() or self._queue.leased():
            self._found.mistakes.append("the queue is not empty")

        interval = {
            "interval_start": f"{truth.BEGIN:%FT%TZ}",
            "interval_end": f"{truth.END:%FT%TZ}",
        }
        past = {"source": "archive", **interval}
        self._run("backfill", first, {**past, "refuse": "yes"})
        self._check_rows("the first backfill", handled, once=True)
        self._check_failed(everything - handled)
        self._run("backfill", second, past)
        self._check_rows("the second backfill", everything, once=True)
        self._check_archive(copies=2)
        self._check_reports()
        return self._found

    # -- runs ----------------------------------------------------------------------------------

    def _live(self, kills: Sequence[str]) -> None:
        """Runs after run, until the queue is empty; they are killed until one dies publishing."""
        portion = self._case.messages // _LIVE_RUNS
        conf: dict[str, Any] = {"refuse": "yes", "max_messages": portion // 2}
        amid = False
        for kinds in (kills, *[()] * _LIVE_RUNS):
            run_id = self._begin(conf)
            self._kill(run_id, kinds)
            amid = amid or self._killed_publishing(run_id)
            self._end(run_id)
        while self._queue.waiting():
            time.sleep(1.0)
            self._end(self._begin({"refuse": "yes"}))
        if not amid:
            self._found.mistakes.append("no run was killed while it published to the archive")

    def _run(self, what: str, kills: Sequence[str], conf: Mapping[str, Any]) -> None:
        """A run, killed as planned; again for what was too quick to be killed."""
        left = list(kills)
        for _ in range(_AT_MOST):
            self._case.tell(f"  {what}")
            run_id = self._begin(conf)
            left = self._kill(run_id, left)
            self._end(run_id)
            if not left:
                return
        self._found.mistakes.append(f"{what}: {left} were never killed")

    def _begin(self, conf: Mapping[str, Any]) -> str:
        return self._airflow.trigger(_DAG, {"rows": str(self._rows), **conf})

    def _kill(self, run_id: str, kinds: Sequence[str]) -> list[str]:
        """Kills tasks of these kinds, one after another; those that were too quick."""
        return [kind for kind in kinds if not self._killer.kill_one(run_id, kind)]

    def _end(self, run_id: str) -> None:
        state, trouble = self._killer.end_of(run_id)
        self._found.mistakes += trouble
        self._case.tell(f"  {run_id}: {state}, {self._queue.waiting()} messages are left")

    def _struck(self, name: str, target: str) -> None:
        self._found.killed[name] += 1
        self._case.tell(f"  kill {self._found.killed.total()}: {target}")

    def _killed_publishing(self, run_id: str) -> bool:
        """Kills the settling task once files of a generation are placed but not committed.

        Whether that was so still when it was dead.
        """
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit:
            if self._airflow.dag_run(_DAG, run_id)["state"] in FINISHED:
                return False
            targets = victims(self._airflow, _DAG, run_id, KINDS["ack"], "task")
            stale = time.monotonic() + 1.0
            while targets and time.monotonic() < stale:
                if self._unnamed():
                    kill(targets[0])
                    self._struck("publication", f"{targets[0].task}, {targets[0].state}")
                    return bool(self._unnamed())
                time.sleep(0.001)
            time.sleep(0.1)
        return False

    def _unnamed(self) -> set[str]:
        """Generations of which files lie in the archive, and that no commit has."""
        folder = self._case.folder / "staging" / self._archive.path
        actions = [
            json.loads(line)
            for path in (folder / "_delta_log").glob("*.json")
            for line in path.read_text().splitlines()
        ]
        named = {action["txn"]["appId"] for action in actions if "txn" in action}
        return {path.name[:32] for path in folder.glob("date=*/hour=*/*.parquet")} - named

    # -- what came of it -----------------------------------------------------------------------

    def _check_rows(self, when: str, wanted: set[int], *, once: bool = False) -> None:
        """Each message has a row; further rows are marked as possible duplicates."""
        counts = truth.rows(self._rows)
        copies: Counter[int] = Counter()
        unmarked: Counter[int] = Counter()
        for (number, marked), count in counts.items():
            copies[number] += count
            unmarked[number] += 0 if marked else count
        lost = sorted(wanted - copies.keys())
        self._found.lost += lost
        twice = [number for number, count in copies.items() if count > 1]
        self._found.duplicates += len(twice)
        self._found.unmarked += sum(unmarked[number] > 1 for number in twice)
        for what, numbers in (
            ("have no row", lost),
            ("have a row, and should not", sorted(copies.keys() - wanted)),
            ("have several rows", sorted(twice) if once else []),
        ):
            if numbers:
                self._found.mistakes.append(f"after {when} {len(numbers)} {what}: {numbers[:10]}")

    def _check_archive(self, *, copies: int) -> None:
        """It holds each message once, and again those that were sent back; it gives each once."""
        index = look(self._archive)
        numbers: Counter[int] = Counter()
        for table in tables(self._archive, index, Interval(truth.BEGIN, truth.END)):
            payloads: list[Any] = table["payload"].to_pylist()
            numbers.update(map(int, payloads))
        if numbers != Counter(range(self._case.messages)):
            self._found.mistakes.append(f"the archive gives {numbers.total()} messages")
        wanted = self._case.messages
        wanted += (copies - 1) * sum(map(truth.refused, range(self._case.messages)))
        if index.messages != wanted:
            self._found.mistakes.append(
                f"the archive holds {index.messages} messages, not {wanted}"
            )
        if index.untimed or index.lost:
            self._found.mistakes.append(
                f"of the archive {index.untimed} {index.lost} are not right"
            )

    def _check_failed(self, wanted: set[int]) -> None:
        """Failures of a backfill are kept next to the archive, once per run that failed them."""
        folder = self._case.folder / "staging" / self._archive.path / "_failed"
        lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        failed: dict[str, Counter[int]] = defaultdict(Counter)
        for letter in map(json.loads, lines):
            failed[letter["run_id"]][int(b64decode(letter["payload"]))] += 1
        if not failed:
            self._found.mistakes.append("nothing failed in the backfill")
        for run_id, numbers in failed.items():
            if numbers != Counter(wanted):
                self._found.mistakes.append(
                    f"{numbers.total()} failed in {run_id}, not {len(wanted)}"
                )

    def _check_reports(self) -> None:
        for path in (self._case.folder / "staging").rglob("report.json"):
            report = json.loads(path.read_text())
            if not report["balanced"]:
                self._found.mistakes.append(f"{path} does not balance: {report['totals']}")
