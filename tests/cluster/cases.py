"""Faults that strike the cluster during a run: kills, outages, a skewed clock."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.cluster import DAG_ID, TRIGGERER, WORKERS, Cluster
from tests.cluster.hosts import NamespaceHost
from tests.cluster.services import ServiceMissing

#: Seconds for which a service or a host is away.
OUTAGE = 30.0
PROCESS = "broadway.process"
#: Runs after which a case is given up.
MAX_RUNS = 5
#: Seconds by which one host's clock is ahead.
SKEW = 300


@dataclass
class Case:
    """One run, and the fault that strikes it.

    :param disturb: Called once, when the run's process tasks are at work, with the name of the
        worker that executes the first of them.
    :param worker_env: Variables of the second worker, from before the run until its end.
    :param network: Whether it takes a host off the network.
    :param retries: Whether it fails a task.
    """

    name: str
    disturb: Callable[[Cluster, str], None] = lambda cluster, worker: None
    worker_env: Callable[[Cluster], Mapping[str, str]] = field(default=lambda cluster: {})
    network: bool = False
    retries: bool = False


def run_case(cluster: Cluster, case: Case, messages: int, seed: int | None) -> dict[str, Any]:
    """Sends messages, runs the DAG until a run succeeds and leaves no message, and counts from
    outside.
    """
    env = case.worker_env(cluster)
    if env:
        cluster.kill(WORKERS[1], "celery")
        cluster.start_worker(WORKERS[1], env)
    expected = cluster.send(messages, seed)
    began, states, hosts, retries = time.monotonic(), list[str](), set[str](), 0
    while not states or states[-1] != "success" or cluster.backlog():
        run_id = cluster.trigger(DAG_ID)
        if not states:
            working = ("running", "success")
            task = cluster.wait_for_task(DAG_ID, run_id, PROCESS, working, map_index=0)
            time.sleep(2.0)
            case.disturb(cluster, task["hostname"])
        states.append(cluster.wait_for_run(DAG_ID, run_id, timeout=600))
        tasks = cluster.task_instances(DAG_ID, run_id)
        hosts |= {task["hostname"] for task in tasks if task["hostname"]}
        retries += sum(max(0, task["try_number"] - 1) for task in tasks)
        if env:
            cluster.kill(WORKERS[1], "celery")
            cluster.start_worker(WORKERS[1])
            env = {}
        if len(states) > MAX_RUNS:
            break
    rows, dead_letters = cluster.output(), set(cluster.dead_letters())
    cluster.purge_dead_letters()
    again = [marks for marks in rows.values() if len(marks) > 1]
    return {
        "case": case.name,
        "messages": messages,
        "lost": len(expected.rows - set(rows)) + len(expected.dead_letters - dead_letters),
        "handled again": sum(len(marks) - 1 for marks in again),
        "unmarked": sum(len(marks) - 1 > sum(marks) for marks in again),
        "runs": states,
        "hosts": sorted(hosts),
        "retries": retries,
        "seconds": round(time.monotonic() - began, 1),
    }


def kill_worker(cluster: Cluster, worker: str) -> None:
    """Kills a worker with its tasks; it starts again after a while."""
    cluster.kill(worker, "celery")
    time.sleep(5.0)
    cluster.start_worker(worker)


def kill_triggerer(cluster: Cluster, worker: str) -> None:
    """Kills the triggerer, in which the ack sensor waits."""
    cluster.kill(*TRIGGERER)
    time.sleep(5.0)
    cluster.start_component(TRIGGERER[1])


def stall_bucket(cluster: Cluster, worker: str) -> None:
    """Stops every request to the bucket for a while."""
    cluster.services.s3_gate.stall()
    time.sleep(OUTAGE)
    cluster.services.s3_gate.go_on()


def disconnect_worker(cluster: Cluster, worker: str) -> None:
    """Takes a host off the network for a while; its tasks keep running, and wake late."""
    host = cluster.hosts[worker]
    assert isinstance(host, NamespaceHost)
    host.disconnect()
    time.sleep(2 * OUTAGE)
    host.connect()


def restart_database(cluster: Cluster, worker: str) -> None:
    """Restarts PostgreSQL."""
    cluster.services.postgres.restart()


def without_credentials(cluster: Cluster) -> Mapping[str, str]:
    """Returns the variables of a worker whose connection has no credentials of the bucket."""
    connection = json.loads(cluster.env["AIRFLOW_CONN_CLUSTER_S3"])
    del connection["login"], connection["password"]
    return {"AIRFLOW_CONN_CLUSTER_S3": json.dumps(connection), "AWS_EC2_METADATA_DISABLED": "true"}


def with_skewed_clock(cluster: Cluster) -> Mapping[str, str]:
    """Returns the variables of a worker whose clock is ahead.

    :raises ServiceMissing: Without a C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise ServiceMissing("a C compiler, which makes the skewed clock, is not installed")
    host = cluster.hosts[WORKERS[1]]
    library, source = "clock_skew.so", Path(__file__).with_name("clock_skew.c")
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(host.folder / library), str(source)]
    subprocess.run([*command, "-ldl"], check=True)
    env = {"LD_PRELOAD": str(host.disk / library), "CLOCK_SKEW": str(SKEW)}
    clock = host.run([sys.executable, "-c", "import time; print(time.time())"], env)
    if float(clock) < time.time() + SKEW - 60:
        raise ServiceMissing("a C library whose clock can be replaced (LD_PRELOAD) is missing")
    return env


CASES = [
    Case("nothing"),
    Case("a worker is killed", kill_worker, retries=True),
    Case("a host is off the network for a minute", disconnect_worker, network=True, retries=True),
    Case("the bucket is away for 30 s", stall_bucket),
    Case("PostgreSQL restarts", restart_database),
    Case("the triggerer is killed", kill_triggerer),
    Case("a worker without the bucket's credentials", worker_env=without_credentials, retries=True),
    Case("a worker's clock is 5 minutes ahead", worker_env=with_skewed_clock),
]
