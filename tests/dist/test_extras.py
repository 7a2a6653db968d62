"""The wheel alone and with each extra, in environments of their own: what it serves is imported."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from scripts.airflow_env import ROOT
from tests.matrix.cells import HOME, RUNNING, find_python, uv

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Extra → the packages that it serves or installs; of this package, all their modules.
SERVES = {
    "": "airflow_broadway.cli airflow_broadway.core airflow_broadway.operators"
    " airflow_broadway.plugin airflow_broadway.producers.sqlite airflow_broadway.runs"
    " airflow_broadway.sensors airflow_broadway.staging airflow_broadway.submit",
    "all": "airflow_broadway",
    "delta": "airflow_broadway.sinks.delta deltalake",
    "demo": "airflow_broadway.spark pyspark rich tenacity",
    "iceberg": "airflow_broadway.sinks.iceberg pyiceberg pyiceberg_core",
    "kafka": "airflow_broadway.producers.kafka confluent_kafka",
    "kubernetes": "airflow.providers.cncf.kubernetes kubernetes",
    "messaging": "airflow_broadway.triggers",
    "openlineage": "airflow_broadway.adapters airflow.providers.openlineage",
    "postgres": "airflow_broadway.sinks.postgres psycopg",
    "pubsub": "airflow_broadway.producers.pubsub google.cloud.pubsub google.cloud.monitoring_v3",
    "rabbitmq": "airflow_broadway.producers.rabbitmq httpx pika",
    "s3": "airflow.providers.amazon.aws.fs.s3 s3fs",
    "spark": "airflow_broadway.spark pandas pyspark",
    "sqs": "airflow_broadway.producers.sqs airflow.providers.amazon boto3",
}

IMPORT = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    if name.startswith("airflow_broadway") and hasattr(module, "__path__"):
        for found in pkgutil.walk_packages(module.__path__, name + "."):
            if not found.name.startswith("airflow_broadway.testing"):  # needs pytest
                importlib.import_module(found.name)
print(importlib.import_module("airflow_broadway").__file__)
"""
@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    [built] = WheelBuilder(str(ROOT)).build(
        directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"]
    )
    return Path(built)


def test_each_extra_is_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*project["optional-dependencies"], ""} == set(SERVES)


@pytest.mark.parametrize("extra", SERVES)
def test_what_an_extra_serves_is_imported(extra, wheel):
    folder = HOME / f"extra-{extra or 'none'}"
    interpreter = str(folder / "bin" / "python")
    uv("venv", "--clear", "--python", find_python(RUNNING), str(folder))
    uv("pip", "install", "--python", interpreter, f"{wheel}[{extra}]" if extra else str(wheel))

    ended = subprocess.run(
        [interpreter, "-I", "-c", IMPORT, *SERVES[extra].split()],
        env={"HOME": str(folder), "AIRFLOW_HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.splitlines()[-1].startswith(str(folder))
