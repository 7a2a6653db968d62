"""Prepares the inputs of spark-submit: the program, the packaged code, the settings."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_broadway.spark.job import CLIENT_VARIABLE
from airflow_broadway.submit.environment import (
    SparkProgram,
    check_classic,
    check_java,
    default_conf,
    file_settings,
    find_spark,
    python_variables,
)
from airflow_broadway.submit.package import Shipment, check_import, ship

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The user's configuration of spark-submit.

    :param master: The Spark master's URL; like ``deploy_mode`` and ``binary`` from the connection.
    :param deploy_mode: ``"client"`` or ``"cluster"``.
    :param binary: The program's name.
    :param conf: Settings.
    :param env_vars: Environment variables of the program.
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
    """The inputs of spark-submit, except for the application's arguments.

    :param program: The spark-submit program.
    :param application: The path of the script.
    :param py_files: Code, comma-separated: the pipeline's first.
    :param conf: Settings; visible on the command line, so none is a secret.
    :param variables: Environment variables of the program, including secrets.
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
    client_options: Mapping[str, Any] | None = None,
    secrets: Mapping[str, str] | None = None,
    check: bool = True,
) -> Submission:
    """Finds Spark, packages the code, and completes the configuration.

    :param ref: The pipeline's reference.
    :param run_uri: The run's folder, as a URI for Spark.
    :param folder: The output folder; it must exist until Spark has started.
    :param client_options: Options of the client of the staging root, including secrets.
    :param secrets: Further environment variables of the driver, of sinks.
    :param check: Whether to import the pipeline in a separate process, as the driver will.
    :raises BroadwayError: With one sentence on what is missing.
    """
    env = {**os.environ, **{name: str(value) for name, value in chosen.env_vars.items()}}
    program = find_spark(chosen.binary, env)
    env = {**program.env, **env}
    client = chosen.deploy_mode != "cluster"
    file_conf = file_settings(chosen.properties_file, env, program.binary)
    check_classic(env, {**file_conf, **chosen.conf})
    if program.bundled and client:
        check_java(env)
    own = [file.strip() for file in chosen.py_files.split(",") if file.strip()]
    shipment = ship(str(ref["class"]), folder)
    log.info("Shipping the packages %s to Spark.", shipment.packages)
    if check:
        _check(ref, shipment, own)
    conf = {**chosen.conf, **default_conf(chosen.master, chosen.conf, file_conf)}
    variables, secret = dict(program.env), dict(secrets or {})
    if client_options:
        secret[CLIENT_VARIABLE] = json.dumps(dict(client_options))
    if client:
        variables |= python_variables(conf, env) | secret
    elif secret:
        log.warning(
            "In cluster mode no credentials are handed to Spark: it uses its own chain of"
            " providers for %s; not handed over: %s.",
            run_uri,
            ", ".join(secret),
        )
    return Submission(
        program=program,
        application=str(shipment.launcher),
        py_files=",".join([str(shipment.zip), *own]),
        conf=conf,
        variables=variables,
    )


def _check(ref: Mapping[str, Any], shipment: Shipment, own: list[str]) -> None:
    if any("://" in file for file in own):  # remote files cannot be imported here
        return
    for warning in check_import(ref, shipment, py_files=own):
        log.warning("%s", warning)
