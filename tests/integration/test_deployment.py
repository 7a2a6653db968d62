"""An Airflow as it is deployed: Dags from git, connections from a secrets back end, a bucket for
staging and logs, and full pools."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import airflow_env
from scripts.local_airflow import LocalAirflow, free_port
from tests.airflow_home import made_home
from tests.s3_server import S3Server, s3_server
from tests.waiting import eventually

pytest.importorskip("airflow.providers.git", reason="scripts/run.sh --cluster installs it")
pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(1800)]

#: Seconds for which a machine may be busy with other tests.
PATIENCE = 500.0

PIPELINES = """\
import json
import time
from pathlib import Path

from airflow_broadway import Batcher, Broadway
from airflow_broadway.producers import SqliteProducer
from shop.version import VERSION


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", conn_id="orders_queue")
    batchers = {"default": Batcher(schema="folder string, processed long")}

    def handle_message(self, processor, message, context):
        folder = Path(message.data.decode())
        folder.joinpath("begun").touch()
        while not folder.joinpath("go").exists():
            time.sleep(0.1)
        return message.put_data({"folder": str(folder), "processed": VERSION})

    def handle_batch(self, batcher, messages, batch_info, context):
        for row in messages.select("data.*").collect():
            versions = {"process": row.processed, "driver": VERSION}
            Path(row.folder, "versions.json").write_text(json.dumps(versions))


class Late(Broadway):
    producer = SqliteProducer(queue="late", conn_id="orders_queue", lease=100.0)
    batchers = {"default": Batcher(engine="python")}

    def handle_message(self, processor, message, context):
        return message.put_data(message.data.decode())

    def handle_batch(self, batcher, messages, batch_info, context):
        return messages
"""

DAGS = """\
import time
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, task
from shop.pipelines import Late, Orders

with DAG("orders", schedule=None):
    Orders().task_group(process={"idle_seconds": 0}, ack={"deferrable": True})
with DAG("late", schedule=None):
    Late().task_group(process={"idle_seconds": 0}, ack={"pool": "acks"})
with DAG("occupier", schedule=None, params={"folder": ""}):

    @task(pool="acks", retries=9, retry_delay=timedelta(seconds=1))
    def occupy(params):
        Path(params["folder"], "begun").touch()
        while not Path(params["folder"], "go").exists():
            time.sleep(0.1)

    occupy()
"""


@dataclass
class Site:
    """The Airflow, its repository, its bucket, and its queue file."""

    airflow: LocalAirflow
    folder: Path
    repository: Path
    bucket: S3Server

    def commit(self, version: int) -> str:
        """Commits the Dags with a version of the pipelines; returns the commit."""
        (self.repository / "dags/shop/version.py").write_text(f"VERSION = {version}\n")
        git(self.repository, "add", ".")
        git(self.repository, "commit", "--quiet", "--message", f"version {version}")
        return git(self.repository, "rev-parse", "HEAD")

    def queue(self, name: str) -> SqliteQueue:
        queue = SqliteQueue(self.folder / "queue.db", name)
        queue.create()
        return queue

    def log(self, dag_id: str, run_id: str, task: str) -> str:
        """The logs of a task, from the bucket."""
        fs = self.bucket.store("s3://logs").fs
        paths = fs.find(f"logs/dag_id={dag_id}/run_id={run_id}/task_id={task}")
        return "\n".join(fs.cat_file(path).decode() for path in paths)

    def make_folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        return folder


def git(folder: Path, *arguments: str) -> str:
    name = ["-c", "user.name=Tests", "-c", "user.email=tests@example.org"]
    command = ["git", "-C", str(folder), *name, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployed")
    repository, empty = folder / "repository", folder / "empty"
    (repository / "dags/shop").mkdir(parents=True)
    empty.mkdir()
    (repository / "dags/shop/pipelines.py").write_text(PIPELINES)
    (repository / "dags/orders.py").write_text(DAGS)
    git(repository, "init", "--quiet", "--initial-branch", "main")
    with s3_server() as bucket:
        for name in ("lake", "logs"):
            bucket.store(f"s3://{name}").fs.makedirs(name, exist_ok=True)
        secrets = folder / "connections.json"
        secrets.write_text(
            json.dumps(
                {
                    "spark_default": {"conn_type": "spark", "host": "local[2]"},
                    "orders_queue": {
                        "conn_type": "broadway_sqlite",
                        "host": str(folder / "queue.db"),
                    },
                    "lake": {
                        "conn_type": "aws",
                        "login": "test",
                        "password": "test",
                        "extra": {"endpoint_url": bucket.endpoint, "region_name": "us-east-1"},
                    },
                }
            )
        )
        bundle = {
            "name": "shop",
            "classpath": "airflow.providers.git.bundles.git.GitDagBundle",
            "kwargs": {
                "repo_url": str(repository),
                "tracking_ref": "main",
                "subdir": "dags",
                "refresh_interval": 1,
            },
        }
        env = airflow_env(
            home=made_home(folder / "home"),
            dags=empty,
            port=free_port(),
            settings={
                "dag_processor.dag_bundle_config_list": json.dumps([bundle]),
                "core.dagbag_import_timeout": "120",
                "dag_processor.bundle_refresh_check_interval": "1",
                "dag_processor.dag_bundle_storage_path": str(folder / "bundles"),
                "secrets.backend": "airflow.secrets.local_filesystem.LocalFilesystemBackend",
                "secrets.backend_kwargs": json.dumps({"connections_file_path": str(secrets)}),
                "broadway.staging": "s3://lake@lake/broadway",
                "logging.remote_logging": "True",
                "logging.remote_base_log_folder": "s3://logs",
                "logging.remote_log_conn_id": "lake",
            },
        )
        # Only the back end has connections and credentials.
        prefixes = ("AIRFLOW_CONN_", "AWS_")
        env = {name: value for name, value in env.items() if not name.startswith(prefixes)}
        airflow = LocalAirflow(env, folder / "logs")
        result = Site(airflow, folder, repository, bucket)
        result.commit(1)
        try:
            airflow.start()
            airflow.wait_healthy(PATIENCE)
            airflow.wait_for_dag("orders", timeout=PATIENCE)
            airflow.api("POST", "/pools", {"name": "acks", "slots": 1})
            yield result
        finally:
            airflow.stop()


def test_a_run_keeps_the_version_of_its_bundle_in_the_spark_driver_too(site):
    airflow = site.airflow
    folder = site.make_folder("first")
    first = git(site.repository, "rev-parse", "HEAD")
    queue = site.queue("orders")
    queue.send([str(folder).encode()])

    # Given a run of the first version in its process task, and a second version already parsed
    run_id = airflow.trigger("orders")
    eventually((folder / "begun").exists, PATIENCE)
    second = site.commit(2)
    eventually(lambda: airflow.wait_for_dag("orders")["bundle_version"] == second, PATIENCE)

    # When the run continues
    (folder / "go").touch()
    assert airflow.wait_for_run("orders", run_id, timeout=PATIENCE) == "success"

    # Then all its tasks use the first version, and its driver's log is in the bucket
    assert airflow.dag_run("orders", run_id)["bundle_version"] == first
    assert json.loads((folder / "versions.json").read_text()) == {"process": 1, "driver": 1}
    assert "Spark application" in site.log("orders", run_id, "broadway.handle_batches")
    assert sum(queue.depth()[:4]) == 0

    # The next run uses the second
    folder = site.make_folder("second")
    (folder / "go").touch()
    queue.send([str(folder).encode()])
    assert airflow.wait_for_run("orders", airflow.trigger("orders"), timeout=PATIENCE) == "success"
    assert json.loads((folder / "versions.json").read_text()) == {"process": 2, "driver": 2}

    # So does the command line
    command = ["airflow-broadway", "depth", "--pipeline", "shop.pipelines:Orders", "--json"]
    done = subprocess.run(command, env=airflow.env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)


def test_a_sensor_that_waits_for_a_slot_logs_its_pool_and_loses_no_message(site):
    airflow = site.airflow
    folder = site.make_folder("occupied")
    queue = site.queue("late")
    queue.send([b"1", b"2", b"3"])

    # Given a pool without a slot for the sensor
    airflow.trigger("occupier", {"folder": str(folder)})
    eventually((folder / "begun").exists, PATIENCE)
    run_id = airflow.trigger("late")
    # Then the batch task settles
    eventually(lambda: sum(queue.depth()[:4]) == 0, PATIENCE)

    # When the sensor gets a slot after a quarter of the lease
    time.sleep(25)
    (folder / "go").touch()

    # Then its log names the pool
    assert airflow.wait_for_run("late", run_id, timeout=PATIENCE) == "success"
    warning = "s for a slot (pool 'acks') and renewed no lease meanwhile"
    eventually(lambda: warning in site.log("late", run_id, "broadway.ack"), PATIENCE)
