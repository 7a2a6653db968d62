"""``docker/compose.yaml``, as far as it can be held true without a container engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scripts.airflow_env import ROOT
from scripts.local_airflow import free_port
from tests.s3_server import s3_server
from tests.waiting import eventually

DOCKER = ROOT / "docker"
KAFKA = ROOT / "scripts/kafka/pom.xml"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
#: The schema of https://github.com/compose-spec/compose-spec, under the Apache License 2.0.
SCHEMA = json.loads((Path(__file__).parent / "compose-spec.json").read_text())
SETTINGS: dict[str, str] = SERVICES["worker"]["environment"]

each_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    """The secrets of a first set-up."""
    folder = tmp_path_factory.mktemp("docker") / "secrets"
    for _ in range(2):  # the second keeps what the first has written
        before = {path.name: path.read_text() for path in folder.glob("*")}
        subprocess.run([sys.executable, DOCKER / "make_secrets.py", folder], check=True)
        assert before.items() <= {path.name: path.read_text() for path in folder.glob("*")}.items()
    assert folder.stat().st_mode & 0o777 == 0o700
    return folder


def test_the_file_is_valid():
    jsonschema.validate(COMPOSE, SCHEMA)


def locked(package: str) -> str:
    [version] = re.findall(
        rf"^{package}==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE
    )
    return str(version)


def installed(*command: str) -> str:
    """The version that a program reports; the test is skipped where it is not installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return str(re.findall(r"\d+\.\d+(?:\.\d+)?", output)[0])


@pytest.mark.parametrize(
    ("service", "version"),
    [
        ("aws", lambda: locked("moto")),
        ("kafka", lambda: re.findall("<version>(.*?)<", KAFKA.read_text())[1]),
        ("postgres", lambda: installed("psql", "--version")),
        ("rabbitmq", lambda: installed("rabbitmqctl", "version")),
    ],
)  # fmt: skip
def test_images_have_the_versions_of_the_suites(service, version):
    tag = SERVICES[service]["image"].rpartition(":")[2]
    assert tag.removesuffix("-management-alpine") == version()


@each_service
def test_ports_are_on_loopback_and_new_privileges_are_refused(service):
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert service["security_opt"] == ["no-new-privileges:true"]


@each_service
def test_a_service_that_stays_has_a_health_check(service):
    assert ("healthcheck" in service) is (service["restart"] == "unless-stopped")


@each_service
def test_what_a_service_depends_on_starts_with_it(service):
    for name in service.get("depends_on", ()):
        assert set(service["profiles"]) <= set(SERVICES[name]["profiles"])


@each_service
def test_secrets_are_files_that_are_made(service, secrets):
    used = {
        secret if isinstance(secret, str) else secret["source"]
        for secret in service.get("secrets", ())
    }
    assert used <= COMPOSE["secrets"].keys()
    assert set(re.findall(r"/run/secrets/([\w.]+)", json.dumps(service))) <= used
    values = {path.read_text() for path in secrets.iterdir()}
    assert not any(value in json.dumps(service) for value in values)


def test_every_secret_is_made(secrets):
    made = {f"secrets/{path.name}" for path in secrets.iterdir()}
    assert {secret["file"] for secret in COMPOSE["secrets"].values()} <= made


def test_mounted_folders_exist():
    volumes = [volume for service in SERVICES.values() for volume in service.get("volumes", ())]
    sources = {re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).partition(":")[0] for volume in volumes}
    assert all((DOCKER / source).is_dir() for source in sources if source.startswith("."))
    assert {source for source in sources if not source.startswith(".")} == COMPOSE["volumes"].keys()


@pytest.mark.parametrize("name", [name for name in SETTINGS if name.startswith("AIRFLOW__")])
def test_settings_are_airflows(name):
    from airflow.configuration import conf

    section, option = name.removeprefix("AIRFLOW__").lower().split("__", 1)
    if section == "celery":
        pytest.importorskip("airflow.providers.celery")
    known = conf.configuration_description
    assert option.removesuffix("_cmd") in known[section]["options"]
    if option.endswith("_cmd"):  # else Airflow does not run it
        assert (section, option.removesuffix("_cmd")) in conf.sensitive_config_values


@pytest.mark.parametrize(
    "command",
    [
        service["command"] if isinstance(service["command"], str) else check
        for service in SERVICES.values()
        if isinstance(service.get("command"), str)
        for check in [service["healthcheck"]["test"][1]]
    ]
    + [
        service["healthcheck"]["test"][1]
        for service in SERVICES.values()
        if "airflow jobs" in str(service.get("healthcheck"))
    ],
)
def test_airflow_has_the_commands(command, monkeypatch):
    from airflow.cli import cli_parser

    if command.startswith("celery"):
        pytest.importorskip("airflow.providers.celery")
    words = command.removeprefix("airflow ").replace('"', "").split()
    cli_parser.get_parser().parse_args(words)


def test_connections_are_read_by_the_secrets_back_end(secrets):
    from airflow.secrets.local_filesystem import LocalFilesystemBackend

    kwargs = json.loads(SETTINGS["AIRFLOW__SECRETS__BACKEND_KWARGS"])
    kwargs["connections_file_path"] = kwargs["connections_file_path"].replace(
        "/run/secrets", str(secrets)
    )
    back_end = LocalFilesystemBackend(**kwargs)

    for conn_id, host in {
        "rabbitmq_default": "rabbitmq",
        "kafka_default": None,
        "lake": None,
        "spark_default": "spark://spark-master:7077",
        "flights_queue": "/opt/airflow/queues/flights.db",
    }.items():
        connection = back_end.get_connection(conn_id)
        assert connection is not None
        assert (connection.host or None) == host
    user, password = (secrets / "rabbitmq_user").read_text().split(":")
    assert (
        f"default_user = {user}\ndefault_pass = {password}\n"
        == (secrets / "rabbitmq.conf").read_text()
    )


@pytest.mark.airflow
def test_the_set_up_makes_the_bucket(secrets, tmp_path):
    program = re.findall(r"<<'END'\n(.*?)END", SERVICES["airflow-init"]["command"][2], re.DOTALL)
    with s3_server() as bucket:
        connections = json.loads((secrets / "connections.json").read_text())
        connections["lake"]["extra"]["endpoint_url"] = bucket.endpoint
        (tmp_path / "connections.json").write_text(json.dumps(connections))
        env = {
            **os.environ,
            "AIRFLOW__SECRETS__BACKEND": SETTINGS["AIRFLOW__SECRETS__BACKEND"],
            "AIRFLOW__SECRETS__BACKEND_KWARGS": json.dumps(
                {"connections_file_path": str(tmp_path / "connections.json")}
            ),
        }
        store = bucket.store("s3://lake").fs
        if store.exists("lake"):  # by another test of this process
            store.rm("lake", recursive=True)
        before = set(store.ls("", refresh=True))
        for _ in range(2):
            subprocess.run([sys.executable, "-c", program[0]], env=env, check=True)
        assert set(store.ls("", refresh=True)) - before == {"lake"}
        # The health check of the stand-in
        check = SERVICES["aws"]["healthcheck"]["test"][-1]
        check = check.replace("http://127.0.0.1:5000", bucket.endpoint)
        subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.spark
@pytest.mark.slow
def test_spark_starts_and_is_healthy(tmp_path):
    env = {**os.environ, "SPARK_WORKER_DIR": str(tmp_path)}
    port, ui, other = free_port(), free_port(), free_port()
    places = {"spark-master": "127.0.0.1", "7077": str(port), "8081": str(ui), "8082": str(other)}
    started = []
    try:
        for name in ("spark-master", "spark-worker"):
            service = SERVICES[name]
            words = [*service["entrypoint"], *service["command"]]
            started.append(subprocess.Popen([_placed(word, places) for word in words], env=env))
            check = _placed(service["healthcheck"]["test"][-1], places)
            eventually(partial(_succeeds, check), 120)
        eventually(lambda: _states_of_workers(ui) == ["ALIVE"], 120)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _states_of_workers(ui: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{ui}/json/") as reply:
        return [worker["state"] for worker in json.load(reply)["workers"]]


def _succeeds(program: str) -> bool:
    return not subprocess.call([sys.executable, "-c", program], stderr=subprocess.DEVNULL)


def _placed(text: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        text = text.replace(name, place)
    return text
