"""What spark-submit is given: Spark is found, the code is packed, the settings are completed."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_broadway.core.custody.producer import Connection
from airflow_broadway.submit.environment import (
    SparkProgram,
    check_classic,
    check_java,
    default_conf,
    file_settings,
    find_spark,
    python_variables,
    s3_settings,
)
from airflow_broadway.submit.package import Shipment, check_import, ship

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What users have chosen for spark-submit.

    :param master: The Spark master's URL; with ``deploy_mode`` and ``binary`` of the connection.
    :param deploy_mode: ``"client"`` or ``"cluster"``.
    :param binary: The program's name.
    :param conf: Settings.
    :param env_vars: Variables of the program's process.
    :param properties_file: A file of settings.
    :param py_files: Code, comma-separated.
    """

    master: str
    deploy_mode: str
    binary: str
    conf: Mapping[str, Any] = field(default_factory=dict)
    env_vars: Mapping[str, Any] = field(default_factory=dict)
    properties_file: str | None = None
    py_files: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What spark-submit is given, complete but for the application's arguments.

    :param program: How Spark is started.
    :param application: The path of the script.
    :param py_files: Code, comma-separated: the pipeline's first.
    :param conf: Settings; they show on the command line, so none is a secret.
    :param variables: Variables of the program's process, secrets among them.
    """

    program: SparkProgram
    application: str
    py_files: str
    conf: dict[str, Any]
    variables: dict[str, str]


def prepare(
    chosen: Chosen,
    ref: Mapping[str, Any],
    run_uri: str,
    folder: Path,
    *,
    storage: Connection | None = None,
    check: bool = True,
) -> Submission:
    """Find Spark, pack the code, and complete what was chosen.

    :param ref: The pipeline's reference.
    :param run_uri: The run's folder, as Spark finds it.
    :param folder: Where to put what is made; it must last until Spark has started.
    :param storage: The Airflow connection of a staging root in S3.
    :param check: Whether to load the pipeline in a process of its own, as the driver will.
    :raises BroadwayError: With one sentence on what is missing.
    """
    env = {**os.environ, **{name: str(value) for name, value in chosen.env_vars.items()}}
    program = find_spark(chosen.binary, env)
    env = {**program.env, **env}
    client = chosen.deploy_mode != "cluster"
    elsewhere = file_settings(chosen.properties_file, env, program.binary)
    check_classic(env, {**elsewhere, **chosen.conf})
    if program.bundled and client:
        check_java(env)
    own = [each.strip() for each in chosen.py_files.split(",") if each.strip()]
    shipment = ship(str(ref["class"]), folder)
    log.info("Shipping the packages %s to Spark.", shipment.packages)
    if check:
        _check(ref, shipment, own)
    conf = {**chosen.conf, **default_conf(chosen.master, chosen.conf, elsewhere)}
    s3_conf, secret = s3_settings(run_uri, storage, conf)
    variables = dict(program.env)
    if client:
        variables |= python_variables(conf, env) | secret
    elif secret:
        log.warning(
            "In cluster mode no credentials are handed to Spark: it uses its own chain of"
            " providers for %s.",
            run_uri,
        )
    return Submission(
        program=program,
        application=str(shipment.launcher),
        py_files=",".join([str(shipment.zip), *own]),
        conf={**conf, **s3_conf},
        variables=variables,
    )


def _check(ref: Mapping[str, Any], shipment: Shipment, own: list[str]) -> None:
    if any("://" in each for each in own):  # what lies elsewhere cannot be loaded here
        return
    for warning in check_import(ref, shipment, py_files=own):
        log.warning("%s", warning)
