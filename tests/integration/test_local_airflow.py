"""The local Airflow of ``make up`` and of the tests: it works, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from scripts.airflow_env import airflow_env
from scripts.local_airflow import (
    TOKEN_VARIABLE,
    LocalAirflow,
    LocalAirflowError,
    free_port,
    kill_by_token,
    processes_with,
)

DAGS = """\
import subprocess
from airflow.sdk import DAG, task

with DAG("endless", schedule=None):

    @task
    def detached():
        subprocess.run(["sleep", "600"], start_new_session=True)

    detached()
"""


# These are marked slow: other suites start and stop a local Airflow, too.
@pytest.fixture(scope="module")
def airflow(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local_airflow")
    (folder / "dags").mkdir()
    (folder / "dags" / "example.py").write_text(DAGS)
    env = airflow_env(home=folder / "home", dags=folder / "dags", port=free_port())
    airflow = LocalAirflow(env, folder / "logs")
    with airflow:
        yield airflow
    assert processes_with(airflow.token) == []


@pytest.mark.airflow
@pytest.mark.slow
def test_a_second_airflow_on_the_same_home_is_refused(airflow):
    second = LocalAirflow(airflow.env, airflow.log_dir)
    with pytest.raises(LocalAirflowError, match=f"already at {airflow.url}"):
        second.start()


@pytest.mark.airflow
@pytest.mark.slow
def test_stop_ends_detached_processes(airflow):
    # Given a task with a child in a session of its own
    airflow.wait_for_dag("endless")
    run_id = airflow.trigger("endless")
    airflow.wait_for_task("endless", run_id, "detached", ("running",))
    deadline = time.monotonic() + 60
    while "sleep" not in {process.name() for process in airflow.processes_of_tasks()}:
        assert time.monotonic() < deadline, "The task has not started its child."
        time.sleep(0.2)

    # When a component is killed rather than terminated, and Airflow is then stopped
    airflow.processes["scheduler"].send_signal(signal.SIGKILL)
    airflow.stop()

    # Then no process of it is left
    assert processes_with(airflow.token) == []


def test_processes_are_found_by_token():
    token = f"test-{os.getpid()}"
    started = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!"],
        env={**os.environ, TOKEN_VARIABLE: token},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert started.stdout is not None
    orphan = int(started.stdout.readline())
    started.stdout.close()
    started.wait()
    assert [process.pid for process in processes_with(token)] == [orphan]

    kill_by_token(token)

    assert processes_with(token) == []


def test_a_port_in_use_is_skipped():
    first = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", _LISTEN, str(first)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as listener:
        assert listener.stdout is not None
        listener.stdout.readline()
        assert free_port(first) > first
        listener.terminate()


def test_another_airflow_on_the_port_is_recognized(tmp_path):
    # Two checkouts may choose a port at the same time: one server responds for both
    response = json.dumps(
        {
            name: {"status": "healthy", f"latest_{name}_heartbeat": "2999-01-01T00:00:00+00:00"}
            for name in ("metadatabase", "scheduler", "dag_processor")
        }
    )

    class OtherServer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(response.encode())

    with HTTPServer(("127.0.0.1", 0), OtherServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = airflow_env(home=tmp_path, port=server.server_port)
        ours = LocalAirflow(env, tmp_path, components=("api-server", "scheduler"))
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        for name in ours.components:
            ours._started[name] = datetime.now(UTC)
            ours.processes[name] = subprocess.Popen(sleeper)
        try:
            health = ours.health()
        finally:
            for process in ours.processes.values():
                process.kill()
                process.wait()
            server.shutdown()

    assert health == {"api-server": "no answer", "scheduler": "no answer"}


_LISTEN = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
sys.stdin.read()
"""


def test_a_developers_own_airflow_is_ignored(tmp_path):
    env = airflow_env(
        home=tmp_path / "home",
        settings={"scheduler.task_instance_heartbeat_timeout": "10"},
        base={
            "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
            "AIRFLOW__CORE__FERNET_KEY": "theirs",
            "AIRFLOW_CONN_SPARK_DEFAULT": "spark://theirs",
            "LANG": "C.UTF-8",
        },
    )

    assert env["AIRFLOW__CORE__EXECUTOR"] == "LocalExecutor"
    assert env["AIRFLOW__CORE__FERNET_KEY"] != "theirs"
    assert "local[2]" in env["AIRFLOW_CONN_SPARK_DEFAULT"]
    assert env["AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT"] == "10"
    assert env["LANG"] == "C.UTF-8"


def test_the_components_of_one_home_share_one_secret(tmp_path):
    first, second = (airflow_env(home=tmp_path / "home", base={}) for _ in range(2))

    assert first == second
    assert len(first["AIRFLOW__API_AUTH__JWT_SECRET"]) >= 64
