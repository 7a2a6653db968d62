"""``docker/Dockerfile``: its steps, in an environment without containers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from scripts.airflow_env import ROOT

DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
#: (instruction, arguments), continued lines joined.
STEPS = re.findall(
    r"^([A-Z]+) (.*)$",
    re.sub(r"^#.*\n", "", DOCKERFILE.replace("\\\n", ""), flags=re.MULTILINE),
    re.MULTILINE,
)
ARGUMENTS = dict(step[1].split("=", 1) for step in STEPS if step[0] == "ARG" and "=" in step[1])


def test_the_airflow_is_the_newest_tested_one():
    lock = (ROOT / "requirements.lock").read_text()
    assert f"\napache-airflow=={ARGUMENTS['AIRFLOW_VERSION']} " in lock
    assert ("FROM", "apache/airflow:${AIRFLOW_VERSION}-python3.11") in STEPS


def test_it_ends_as_airflows_user():
    users = [argument for instruction, argument in STEPS if instruction == "USER"]
    assert users == ["root", "airflow"]


def test_extras_are_the_packages():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(ARGUMENTS["EXTRAS"].split(",")) <= extras.keys()


def copied() -> list[str]:
    copies = [argument.split() for instruction, argument in STEPS if instruction == "COPY"]
    return [source for *sources, _ in copies for source in sources]


def test_copied_files_exist_and_are_sent_to_the_engine():
    sent = (ROOT / "docker/Dockerfile.dockerignore").read_text().splitlines()
    assert all((ROOT / name).exists() for name in copied())
    assert {line.removeprefix("!") for line in sent if line.startswith("!")} == set(copied())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_packages_install_in_the_locked_versions(tmp_path):
    # Given what the file copies, and an empty environment in place of the image's
    context = tmp_path / "context"
    context.mkdir()
    for name in copied():
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, context / name)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    ours = ("AIRFLOW_", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {**ARGUMENTS, "PATH": f"{tmp_path}/venv/bin:{env['PATH']}", "HOME": str(tmp_path)}

    # When its step runs
    [step] = [argument for instruction, argument in STEPS if "pip install" in argument]
    step = step.replace("/tmp/constraints.txt", f"{tmp_path}/constraints.txt")
    subprocess.run(["bash", "-ec", step], cwd=context, env=env, check=True)

    # Then the package works there, with a Spark, and with Celery
    for command in (
        "airflow-broadway --version",
        "spark-submit --version",
        "pip check",
        "python -c 'import airflow.providers.celery, psycopg2, confluent_kafka, pika, boto3, s3fs'",
        "python -c 'import google.cloud.pubsub, psycopg'",
    ):
        subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=env, check=True)
    frozen = subprocess.run(["pip", "freeze"], env=env, capture_output=True, text=True, check=True)
    locks = "".join((ROOT / name).read_text() for name in copied() if name.endswith(".lock"))
    pinned = {line.split(" ")[0] for line in locks.splitlines() if line[:1].isalpha()}
    found = {line.lower() for line in frozen.stdout.splitlines() if "==" in line}
    assert {line for line in found if line.replace("_", "-") not in pinned} == set()
