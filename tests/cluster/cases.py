"""What happens to the cluster while a run is at work."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.cluster import DAG_ID, QUEUE, TRIGGERER, WORKERS, Cluster
from tests.cluster.hosts import NamespaceHost
from tests.cluster.services import ServiceMissing

#: Seconds for which a service or a host is away.
OUTAGE = 30.0
PROCESS = "broadway.process"
#: Seconds by which one host's clock is ahead.
SKEW = 300


@dataclass
class Case:
    """One run, and what disturbs it.

    :param disturb: Called once, when the run's process tasks are at work, with the name of the
        worker that executes the first of them.
    :param worker_env: Variables of the second worker, from before the run until after it.
    """

    name: str
    disturb: Callable[[Cluster, str], None] = lambda cluster, worker: None
    worker_env: Callable[[Cluster], Mapping[str, str]] = field(default=lambda cluster: {})
    cuts_network: bool = False


def run_case(cluster: Cluster, case: Case, messages: int) -> dict[str, Any]:
    """Sends messages, runs the DAG until the queue is empty, and counts from outside."""
    env = case.worker_env(cluster)
    if env:
        cluster.kill(WORKERS[1], "celery")
        cluster.start_worker(WORKERS[1], env)
    expected = cluster.send(messages)
    began, states, hosts, retries = time.monotonic(), list[str](), set[str](), 0
    while not states or cluster.services.rabbitmq.count(QUEUE):
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
        if len(states) > 5:
            break
    rows, dead_letters = cluster.output(), set(cluster.dead_letters())
    cluster.purge_dead_letters()
    if env:
        cluster.kill(WORKERS[1], "celery")
        cluster.start_worker(WORKERS[1])
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
    """Returns the variables of a worker that does not know the bucket's connection."""
    return {"AIRFLOW_CONN_CLUSTER_S3": ""}


def with_skewed_clock(cluster: Cluster) -> Mapping[str, str]:
    """Returns the variables of a worker whose clock is ahead.

    :raises ServiceMissing: Without a C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise ServiceMissing("a C compiler, which makes the skewed clock, is not installed")
    library = cluster.folder / "clock_skew.so"
    source = cluster.source("clock_skew.c")
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    inside = cluster.hosts[WORKERS[1]].folder / library.name
    shutil.copy2(library, inside)
    disk = cluster.hosts[WORKERS[1]].disk
    return {"LD_PRELOAD": str(disk / library.name), "CLOCK_SKEW": str(SKEW)}


CASES = [
    Case("nothing"),
    Case("a worker is killed", kill_worker),
    Case("a host is off the network for a minute", disconnect_worker, cuts_network=True),
    Case("the bucket is away for 30 s", stall_bucket),
    Case("PostgreSQL restarts", restart_database),
    Case("the triggerer is killed", kill_triggerer),
    Case("a worker without the bucket's connection", worker_env=without_credentials),
    Case("a worker's clock is 5 minutes ahead", worker_env=with_skewed_clock),
]
