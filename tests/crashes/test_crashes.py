"""A fixed part of the campaigns of ``make faults``: about 850 runs over the embedded queue.

The campaigns run in separate processes: they fork, and a test session has threads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_broadway.testing.crashes.spark import uses_spark
from scripts.airflow_env import ROOT
from tests.crashes.campaigns import pipeline_names
from tests.crashes.mutants import MUTANTS
from tests.crashes.pipelines import PIPELINES

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

#: Share of the cases by pipeline; LEAST for all others.
SHARES = {
    "batches": 0.0016,
    "no batchers": 0.0025,
    "one task": 0.0016,
    "commits": 0.006,
    "commits to delta": 0.006,
    "commits to iceberg": 0.002,
    "commits to postgres": 0.006,
}
LEAST = 0.0008


def run(module: str, *options: str) -> str:
    """Runs a program; returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert done.stdout, done.stderr[-3000:]
    return done.stdout


def run_campaign(report: Path, broker: str, pipeline: str, share: float, pairs: int = 0) -> int:
    """Runs a share of the cases; checks that none failed, and that no call was skipped.

    Returns the number of cases.
    """
    result = run(
        "tests.crashes",
        *("--broker", broker, "--pipeline", pipeline),
        *("--share", str(share), "--pairs", str(pairs)),
        *("--jobs", "1", "--report", str(report)),
    )
    [totals] = json.loads(report.read_text())
    assert (totals["failures"], totals["unsteady"]) == ([], []), result
    assert totals["points"] >= min(5, totals["cases"])
    return int(totals["cases"])


@pytest.mark.parametrize(
    "pipeline", [name for name in pipeline_names("sqlite") if not uses_spark(PIPELINES[name])]
)
def test_every_message_is_accounted_for_at_every_crash_point(tmp_path, pipeline):
    pairs = 2 if pipeline in SHARES else 1
    share = SHARES.get(pipeline, LEAST)
    assert run_campaign(tmp_path / "report", "sqlite", pipeline, share, pairs) >= 5


@pytest.mark.parametrize(
    ("source", "pipeline", "share"),
    [("backfill", "refills", 0.002), ("letters", "batches", 0.003)],
    ids=["archive", "dead letters"],
)
def test_backfills_and_requeues_account_for_every_message(tmp_path, source, pipeline, share):
    assert run_campaign(tmp_path / "report", f"sqlite {source}", pipeline, share) >= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broker", "pipeline"),
    [
        ("sqlite by operators", "no batchers"),
        ("kafka", "no batchers"),
        ("kafka key", "no batchers"),
        ("kafka letters", "batches"),
        ("rabbitmq letters", "batches"),
        ("sqs letters", "batches"),
        ("pubsub letters", "batches"),
    ],
)
def test_operators_and_brokers_account_for_every_message(tmp_path, broker, pipeline):
    assert run_campaign(tmp_path / "report", broker, pipeline, 0.002) >= 3


#: Findings of past campaigns: broker, pipeline, case.
FINDINGS = {
    "kafka: a settlement fails at its last step": (
        "kafka",
        "no batchers",
        "one/process/1 mkdir staging/NoBatchers/kafka/<1>/ended/<timestamp> #1: error",
    ),
    "kafka: a process resumes after its lease, before it claims": (
        "kafka",
        "no batchers",
        "one/process/1 replace staging/NoBatchers/kafka/<1>/<6>/lease.json #1:"
        " suspended after [lapse]",
    ),
    "kafka: a process resumes with an empty log": (
        "kafka key",
        "one task",
        "one/run/1 create staging/.tmp- #1: suspended before [lapse]",
    ),
    "kafka: immediate settlements before a lapse": (
        "kafka key",
        "acks immediately",
        "one/poke/1 write staging/AcksImmediately/kafka/<2>/<3>/.tmp- #1: killed before [lapse]",
    ),
    "kafka: two settlements send the same dead letters": (
        "kafka key",
        "two batchers",
        "one/ack/1 replace staging/TwoBatchers/kafka/<8>/<9>/letters-<12>.json #1:"
        " suspended before [next run]",
    ),
    "rabbitmq: a bundle is confirmed after a timeout": (
        "rabbitmq",
        "one task",
        "one/run/1 basic.publish queue.<1> #1: timed out",
    ),
    "rabbitmq: a new holding queue does not answer": (
        "rabbitmq",
        "batches",
        "one/process/1 basic.get broadway.held.queue.0 #1: timed out",
    ),
    "rabbitmq: the connection is lost after a claim": (
        "rabbitmq",
        "one task",
        "one/run/1 queue.bind broadway.held.queue.0 #1: error [retry, traffic]",
    ),
    "pubsub: a process sleeps after its lease check": (
        "pubsub",
        "batches",
        "one/batch.default/1 list staging/Batches/crashes/one/<1> #3:"
        " suspended after [next run, traffic]",
    ),
    "s3: a fork uses a client of its own": (
        "sqlite on s3",
        "two batchers",
        "one/process!1/1 PutObject staging/TwoBatchers/crashes/one/<2>/journal-settled.json #1:"
        " killed before, then one/batch.even/1 handle_batch even #2: killed after [give up]",
    ),
    "one task: an empty run dies while it removes its files": (
        "sqlite on s3",
        "one task",
        "one/run/1 handle_message #10: killed before, then three/run/1 DeleteObject"
        " staging/OneTask/crashes/_open/<3>.json #1: killed after [side by side]",
    ),
    "one task: an empty run dies while it is opened": (
        "sqlite by operators",
        "one task",
        "one/run/1 write staging/OneTask/crashes/one/.tmp- #1: killed halfway, then"
        " three/run/1 write staging/OneTask/crashes/three/generations/.tmp- #1: killed after"
        " [side by side]",
    ),
    "one task: the account of such a run dies too": (
        "sqlite",
        "one task",
        "one/run/1 write staging/OneTask/crashes/one/generations/.tmp- #1: killed after, then"
        " two/run/1 mkdir staging/OneTask/crashes/_balanced #1: killed after [side by side]",
    ),
    "one task: the answer of a receive is lost": (
        "sqlite",
        "one task",
        "one/run/1 COMMIT #2: response lost [retry, traffic]",
    ),
    "pubsub: a suspect and an earlier message of its key": (
        "pubsub ordered",
        "acks immediately",
        "one/process/1 handle_message #8: killed before, then one/process/2 create"
        " staging/AcksImmediately/crashes/one/<11>/.tmp- #2: killed after [clear]",
    ),
    "one task: a callback fails at its first message": (
        "sqlite",
        "one task",
        "one/run/1 handle_message #1: error [retry]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("finding", FINDINGS)
def test_past_findings_stay_fixed(finding):
    broker, pipeline, case = FINDINGS[finding]
    result = run("tests.crashes", "--broker", broker, "--pipeline", pipeline, "--only", case)
    assert "1 cases" in result
    clean = "0 lost, 0 unmarked, 0 left over, 0 rows missing, 0 repeated, 0 other mistakes"
    assert clean in result


@pytest.mark.parametrize(
    "mutant",
    [
        # Slow: lost messages are searched for in a dozen runs.
        pytest.param(name, marks=pytest.mark.slow if item.broker == "sqs letters" else ())
        for name, item in MUTANTS.items()
    ],
)
def test_a_removed_guard_is_detected(mutant):
    unchanged, mutated = json.loads(run("tests.crashes.mutants", mutant))

    assert unchanged == []
    assert any(line.startswith(MUTANTS[mutant].violation) for line in mutated), mutated
