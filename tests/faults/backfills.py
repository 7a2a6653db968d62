"""Kills live runs, a run of the dead letters, and backfills of an archive in a real Airflow.

The live runs are killed while they publish to the archive, the run of the dead letters while it
requeues them, and two backfills in each of their tasks.
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
from tests.faults.case_result import CaseResult
from tests.faults.dags import archived_pipeline as expected
from tests.faults.runs import DAGS, SETTINGS
from tests.faults.task_killer import RUN_TIMEOUT, TASK_KINDS, Killer, find_targets, kill

_DAG = "archived"
#: Live runs after the first; each may be killed while it publishes.
_LIVE_RUNS = 4
#: Maximum number of runs until every planned kill has hit a task.
_MAX_REPEATS = 4


@dataclass(frozen=True, kw_only=True)
class BackfillCase:
    """A case of an archive and its backfills, with its kills.

    :param kills: The kinds of task that are killed in the first live run, in the run of the dead
        letters, and in each of the two backfills.  One live run is also killed while it publishes.
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
    log: Callable[[str], None] = print

    @property
    def name(self) -> str:
        return "sqlite.backfills"


def run_backfills(case: BackfillCase) -> CaseResult:
    """Runs the case in an Airflow that only it uses."""
    case.folder.mkdir(parents=True, exist_ok=True)
    queue = Sqlite(case.folder)
    settings = {**SETTINGS, "broadway.staging": f"file://{case.folder / 'staging'}"}
    env = airflow_env(home=case.home, dags=DAGS, port=free_port(8180), settings=settings)
    try:
        with LocalAirflow({**env, **queue.variables()}, case.folder / "airflow") as airflow:
            return _BackfillRun(case, queue, airflow).execute()
    finally:
        queue.close()


class _BackfillRun:
    def __init__(self, case: BackfillCase, queue: Sqlite, airflow: LocalAirflow) -> None:
        self._case = case
        self._queue = queue
        self._airflow = airflow
        self._rows = case.folder / "rows"
        self._result = CaseResult(case.name, case.messages)
        self._killer = Killer(airflow, _DAG, random.Random(case.seed), self._count_kill)
        self._archive = archive_folder(
            Store.open(f"file://{case.folder / 'staging'}"), "ArchivedPipeline"
        )

    def execute(self) -> CaseResult:
        self._airflow.wait_for_dag(_DAG, timeout=120)
        self._killer.fail_leftover_runs()
        live, letters, first, second = self._case.kills
        self._queue.send([b"%d" % number for number in range(self._case.messages)])
        everything = set(range(self._case.messages))
        handled = {number for number in everything if not expected.is_rejected(number)}

        self._run_live(live)
        self._check_archive(copies=1)
        self._check_rows("live runs", handled)
        self._run("dead letters", letters, {"source": "dead_letters"})
        self._check_rows("the run of the dead letters", everything)
        if self._queue.dead_letters() or self._queue.waiting() or self._queue.leased():
            self._result.mistakes.append("the queue is not empty")

        interval = {
            "interval_start": f"{expected.BEGIN:%FT%TZ}",
            "interval_end": f"{expected.END:%FT%TZ}",
        }
        archive = {"source": "archive", **interval}
        self._run("backfill", first, {**archive, "refuse": "yes"})
        self._check_rows("the first backfill", handled, once=True)
        self._check_failed(everything - handled)
        self._run("backfill", second, archive)
        self._check_rows("the second backfill", everything, once=True)
        self._check_archive(copies=2)
        self._check_reports()
        return self._result

    # -- runs ----------------------------------------------------------------------------------

    def _run_live(self, kills: Sequence[str]) -> None:
        """Runs until the queue is empty; kills runs until one has died while it published."""
        portion = self._case.messages // _LIVE_RUNS
        conf: dict[str, Any] = {"refuse": "yes", "max_messages": portion // 2}
        killed_publishing = False
        for kinds in (kills, *[()] * _LIVE_RUNS):
            run_id = self._begin(conf)
            self._kill(run_id, kinds)
            killed_publishing = killed_publishing or self._kill_while_publishing(run_id)
            self._end(run_id)
        while self._queue.waiting():
            time.sleep(1.0)
            self._end(self._begin({"refuse": "yes"}))
        if not killed_publishing:
            self._result.mistakes.append("no run was killed while it published to the archive")

    def _run(self, name: str, kills: Sequence[str], conf: Mapping[str, Any]) -> None:
        """Runs with the planned kills; runs again for kills that came too late."""
        remaining = list(kills)
        for _ in range(_MAX_REPEATS):
            self._case.log(f"  {name}")
            run_id = self._begin(conf)
            remaining = self._kill(run_id, remaining)
            self._end(run_id)
            if not remaining:
                return
        self._result.mistakes.append(f"{name}: {remaining} were not killed")

    def _begin(self, conf: Mapping[str, Any]) -> str:
        return self._airflow.trigger(_DAG, {"rows": str(self._rows), **conf})

    def _kill(self, run_id: str, kinds: Sequence[str]) -> list[str]:
        """Kills a task of each kind; returns the kinds that ended before their kill."""
        return [kind for kind in kinds if not self._killer.kill_one(run_id, kind)]

    def _end(self, run_id: str) -> None:
        state, problems = self._killer.wait_for_end(run_id)
        self._result.mistakes += problems
        self._case.log(f"  {run_id}: {state}, {self._queue.waiting()} messages are left")

    def _count_kill(self, name: str, target: str) -> None:
        self._result.killed[name] += 1
        self._case.log(f"  kill {self._result.killed.total()}: {target}")

    def _kill_while_publishing(self, run_id: str) -> bool:
        """Kills the settling task while it has written archive files but not committed them.

        Returns whether the files are still uncommitted after the kill.
        """
        limit = time.monotonic() + RUN_TIMEOUT
        while time.monotonic() < limit:
            if self._airflow.dag_run(_DAG, run_id)["state"] in FINISHED:
                return False
            targets = find_targets(self._airflow, _DAG, run_id, TASK_KINDS["ack"], "task")
            stale = time.monotonic() + 1.0
            while targets and time.monotonic() < stale:
                if self._uncommitted_generations():
                    kill(targets[0])
                    self._count_kill("publication", f"{targets[0].task}, {targets[0].state}")
                    return bool(self._uncommitted_generations())
                time.sleep(0.001)
            time.sleep(0.1)
        return False

    def _uncommitted_generations(self) -> set[str]:
        """Returns the generations whose files are in the archive but in no commit."""
        folder = self._case.folder / "staging" / self._archive.path
        actions = [
            json.loads(line)
            for path in (folder / "_delta_log").glob("*.json")
            for line in path.read_text().splitlines()
        ]
        committed = {action["txn"]["appId"] for action in actions if "txn" in action}
        return {path.name[:32] for path in folder.glob("date=*/hour=*/*.parquet")} - committed

    # -- checks --------------------------------------------------------------------------------

    def _check_rows(self, when: str, expected_numbers: set[int], *, once: bool = False) -> None:
        """Checks that each message has a row, and that further rows are marked."""
        counts = expected.rows(self._rows)
        copies: Counter[int] = Counter()
        unmarked: Counter[int] = Counter()
        for (number, marked), count in counts.items():
            copies[number] += count
            unmarked[number] += 0 if marked else count
        lost = sorted(expected_numbers - copies.keys())
        self._result.lost += lost
        twice = [number for number, count in copies.items() if count > 1]
        self._result.duplicates += len(twice)
        self._result.unmarked += sum(unmarked[number] > 1 for number in twice)
        for name, numbers in (
            ("have no row", lost),
            ("have an unexpected row", sorted(copies.keys() - expected_numbers)),
            ("have several rows", sorted(twice) if once else []),
        ):
            if numbers:
                self._result.mistakes.append(f"after {when} {len(numbers)} {name}: {numbers[:10]}")

    def _check_archive(self, *, copies: int) -> None:
        """Checks that the archive stores every message and requeued copy, and reads each once."""
        index = look(self._archive)
        numbers: Counter[int] = Counter()
        for table in tables(self._archive, index, Interval(expected.BEGIN, expected.END)):
            payloads: list[Any] = table["payload"].to_pylist()
            numbers.update(map(int, payloads))
        if numbers != Counter(range(self._case.messages)):
            self._result.mistakes.append(f"the archive reads {numbers.total()} messages")
        expected_numbers = self._case.messages
        expected_numbers += (copies - 1) * sum(
            map(expected.is_rejected, range(self._case.messages))
        )
        if index.messages != expected_numbers:
            self._result.mistakes.append(
                f"the archive holds {index.messages} messages, not {expected_numbers}"
            )
        if index.untimed or index.lost:
            self._result.mistakes.append(
                f"the archive has {index.untimed} untimed and {index.lost} lost messages"
            )

    def _check_failed(self, expected_numbers: set[int]) -> None:
        """Checks that each run recorded its failed messages next to the archive, once."""
        folder = self._case.folder / "staging" / self._archive.path / "_failed"
        lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        failed: dict[str, Counter[int]] = defaultdict(Counter)
        for letter in map(json.loads, lines):
            failed[letter["run_id"]][int(b64decode(letter["payload"]))] += 1
        if not failed:
            self._result.mistakes.append("nothing failed in the backfill")
        for run_id, numbers in failed.items():
            if numbers != Counter(expected_numbers):
                self._result.mistakes.append(
                    f"{numbers.total()} failed in {run_id}, not {len(expected_numbers)}"
                )

    def _check_reports(self) -> None:
        for path in (self._case.folder / "staging").rglob("report.json"):
            report = json.loads(path.read_text())
            if not report["balanced"]:
                self._result.mistakes.append(f"{path} does not balance: {report['totals']}")
