"""Runs the cluster in a separate process, which enters namespaces."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scripts.airflow_env import ROOT
from tests.cluster.cases import CASES
from tests.cluster.cluster import FOLDER
from tests.rabbitmq_server import find_server


@pytest.mark.slow
@pytest.mark.timeout(3_000)
def test_workers_that_share_only_a_bucket_lose_no_message():
    if find_server() is None:
        pytest.skip("RabbitMQ is not installed")
    command = [sys.executable, "-m", "tests.cluster", "--messages", "10000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "PostgreSQL is not installed" in done.stderr:
        pytest.skip("PostgreSQL is not installed")
    results = json.loads(FOLDER.with_suffix(".json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    left_out = done.stdout.count("left out, for ")
    assert len(results) == len(CASES) - left_out, done.stdout
    cases = {(case.queue, case.name): case for case in CASES}
    for result in results:
        assert (result["lost"], result["unmarked"]) == (0, 0), result
        case = cases[result["queue"], result["case"]]
        assert result["retries"] or not case.retries, result
        if case.queue == "Spark" or case.name == "nothing":  # a table contains each row once
            assert result["handled again"] == 0, result
        if case.name == "nothing":
            assert {"worker-1", "worker-2"} <= set(result["hosts"]), result
