"""Faults that are injected into the cluster during a run: kills, outages, a skewed clock."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_broadway import __version__
from scripts.airflow_env import ROOT
from tests.cluster.cluster import TRIGGERER, WORKERS, Cluster
from tests.cluster.hosts import NamespaceHost, kill_tree
from tests.cluster.services import ServiceMissing

#: Duration of an outage of a service or host in seconds.
OUTAGE = 30.0
PROCESS, BATCHES = "broadway.process", "broadway.handle_batches"
#: Maximum number of runs of a case.
MAX_RUNS = 5
#: Clock skew of a host in seconds.
SKEW = 300
#: The package release of one worker.
NEWER = "9.9.9"


@dataclass
class Case:
    """A run and the fault that is injected into it.

    :param disturb: Called once while ``task`` runs, with the name of its worker.
    :param queue: The queue; the case is skipped if its broker, or the JDBC driver, is missing.
    :param worker_env: Returns environment variables of the second worker during the run.
    :param network: Whether the fault disconnects a host.
    :param retries: Whether the fault fails a task.
    """

    name: str
    disturb: Callable[[Cluster, str], None] = lambda cluster, worker: None
    queue: str = "RabbitMQ"
    task: str = PROCESS
    worker_env: Callable[[Cluster], Mapping[str, str]] = field(default=lambda cluster: {})
    network: bool = False
    retries: bool = False


def run_case(cluster: Cluster, case: Case, messages: int, seed: int | None) -> dict[str, Any]:
    """Sends messages, runs the DAG until a run succeeds and the queue is empty, and counts them."""
    env = case.worker_env(cluster)
    if env:
        cluster.kill(WORKERS[1], "celery")
        cluster.start_worker(WORKERS[1], env)
    queue = cluster.queues[case.queue]
    expected = cluster.send(queue, messages, seed)
    began, states, hosts, retries = time.monotonic(), list[str](), set[str](), 0
    while not states or states[-1] != "success" or queue.backlog():
        run_id = cluster.trigger(queue.dag_id)
        if not states:
            working = ("running", "success")
            place = 0 if case.task == PROCESS else -1
            task = cluster.wait_for_task(
                queue.dag_id, run_id, case.task, working, map_index=place, timeout=300
            )
            time.sleep(2.0)
            case.disturb(cluster, task["hostname"])
        states.append(cluster.wait_for_run(queue.dag_id, run_id, timeout=600))
        tasks = cluster.task_instances(queue.dag_id, run_id)
        hosts |= {task["hostname"] for task in tasks if task["hostname"]}
        retries += sum(max(0, task["try_number"] - 1) for task in tasks)
        if env:
            cluster.kill(WORKERS[1], "celery")
            cluster.start_worker(WORKERS[1])
            env = {}
        if len(states) > MAX_RUNS:
            break
    rows = {n: marks for n, marks in cluster.output().items() if n in expected.rows}
    dead_letters = {json.loads(body)["number"] for body in queue.take_dead_letters()}
    again = [marks for marks in rows.values() if len(marks) > 1]
    return {
        "case": case.name,
        "queue": case.queue,
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
    """Kills a worker and its tasks, and restarts it after the outage."""
    cluster.kill(worker, "celery")
    time.sleep(5.0)
    cluster.start_worker(worker)


def kill_triggerer(cluster: Cluster, worker: str) -> None:
    """Kills the triggerer in which the ack sensor waits."""
    cluster.kill(*TRIGGERER)
    time.sleep(5.0)
    cluster.start_component(TRIGGERER[1])


def kill_executor(cluster: Cluster, worker: str) -> None:
    """Kills a Spark executor; its worker starts another."""
    assert cluster.spark
    cluster.spark.executor("worker-0").kill()


def kill_spark_worker(cluster: Cluster, worker: str) -> None:
    """Kills a Spark worker and its executor, and restarts it after the outage."""
    assert cluster.spark
    cluster.spark.executor("worker-1")
    kill_tree(cluster.spark.processes["worker-1"])
    time.sleep(5.0)
    cluster.spark.start_worker(1)


def stall_bucket(cluster: Cluster, worker: str) -> None:
    """Stalls every request to the bucket during the outage."""
    cluster.services.s3_gate.stall()
    time.sleep(OUTAGE)
    cluster.services.s3_gate.resume()


def disconnect_worker(cluster: Cluster, worker: str) -> None:
    """Disconnects a host during the outage; its tasks keep running."""
    host = cluster.hosts[worker]
    assert isinstance(host, NamespaceHost)
    host.disconnect()
    time.sleep(2 * OUTAGE)
    host.connect()


def restart_database(cluster: Cluster, worker: str) -> None:
    """Restarts PostgreSQL."""
    cluster.services.postgres.restart()


def without_credentials(cluster: Cluster) -> Mapping[str, str]:
    """Returns the variables of a worker whose connection has no credentials for the bucket."""
    connection = json.loads(cluster.env["AIRFLOW_CONN_CLUSTER_S3"])
    del connection["login"], connection["password"]
    return {"AIRFLOW_CONN_CLUSTER_S3": json.dumps(connection), "AWS_EC2_METADATA_DISABLED": "true"}


def with_skewed_clock(cluster: Cluster) -> Mapping[str, str]:
    """Returns the variables of a worker whose clock is ahead.

    :raises ServiceMissing: Without a C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise ServiceMissing("the skewed clock needs a C compiler, which is not installed")
    host = cluster.hosts[WORKERS[1]]
    library, source = "clock_skew.so", Path(__file__).with_name("clock_skew.c")
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(host.folder / library), str(source)]
    subprocess.run([*command, "-ldl"], check=True)
    env = {"LD_PRELOAD": str(host.disk / library), "CLOCK_SKEW": str(SKEW)}
    clock = host.run([sys.executable, "-c", "import time; print(time.time())"], env)
    if float(clock) < time.time() + SKEW - 60:
        raise ServiceMissing("a C library whose clock can be replaced (LD_PRELOAD) is missing")
    return env


def with_newer_release(cluster: Cluster) -> Mapping[str, str]:
    """Returns the variables of a worker that has another release of this package."""
    host = cluster.hosts[WORKERS[1]]
    code = host.folder / "newer"
    shutil.rmtree(code, ignore_errors=True)
    shutil.copytree(ROOT / "airflow_broadway", code / "airflow_broadway")
    version = code / "airflow_broadway" / "core" / "version.py"
    version.write_text(version.read_text().replace(f'"{__version__}"', f'"{NEWER}"'))
    env = {"PYTHONPATH": f"{host.disk / 'newer'}{os.pathsep}{cluster.env['PYTHONPATH']}"}
    program = "import airflow_broadway as a; print(a.__version__)"
    reported = host.run([sys.executable, "-c", program], {**cluster.env, **env}).strip()
    assert reported == NEWER, reported
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
    Case("a worker has a newer release", worker_env=with_newer_release),
    Case("nothing", queue="SQS"),
    Case("a worker is killed", kill_worker, queue="SQS", retries=True),
    Case("the bucket is away for 30 s", stall_bucket, queue="SQS"),
    Case("a worker's clock is 5 minutes ahead", queue="SQS", worker_env=with_skewed_clock),
    Case("nothing", queue="Kafka"),
    Case("a worker is killed", kill_worker, queue="Kafka", retries=True),
    Case("the bucket is away for 30 s", stall_bucket, queue="Kafka"),
    Case("nothing", queue="Spark", task=BATCHES),
    Case("an executor is killed", kill_executor, queue="Spark", task=BATCHES),
    Case("a Spark worker is killed", kill_spark_worker, queue="Spark", task=BATCHES),
    Case("a worker is killed", kill_worker, queue="Spark", task=BATCHES, retries=True),
    Case("PostgreSQL restarts", restart_database, queue="Spark", task=BATCHES),
    Case(
        "a worker has a newer release", queue="Spark", task=BATCHES, worker_env=with_newer_release
    ),
]
