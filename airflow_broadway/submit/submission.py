"""Prepares the inputs of spark-submit: the program, the packaged code, the settings."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.errors import OptionsError
from airflow_broadway.spark.connect import VARIABLE, Server
from airflow_broadway.spark.files import s3a_settings
from airflow_broadway.spark.job import CLIENT_VARIABLE
from airflow_broadway.staging.client import public_options
from airflow_broadway.submit.environment import (
    SparkProgram,
    check_classic,
    check_java,
    default_conf,
    file_settings,
    find_spark,
    python_variables,
)
from airflow_broadway.submit.package import (
    UPLOAD_PATH,
    Shipment,
    check_import,
    check_remote,
    import_path,
    publish,
    ship,
)

if TYPE_CHECKING:
    from airflow_broadway.staging.store import Folder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The user's configuration of spark-submit.

    :param master: The URL of a Spark master, or of a Spark Connect server; like ``deploy_mode`` and
        ``binary`` from the connection.
    :param deploy_mode: ``"client"`` or ``"cluster"``.
    :param binary: The program's name.
    :param conf: Settings.
    :param env_vars: Environment variables of the program.
    :param properties_file: A file of settings.
    :param py_files: Code, comma-separated.
    :param files: Other files, comma-separated, by option.
    """

    master: str
    deploy_mode: str
    binary: str
    conf: Mapping[str, Any] = field(default_factory=dict)
    env_vars: Mapping[str, Any] = field(default_factory=dict)
    properties_file: str | None = None
    py_files: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """The inputs of spark-submit, except for the application's arguments.

    :param program: The spark-submit program.
    :param application: The path of the script, or its URI.
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
    run: Folder,
    folder: Path,
    *,
    client_options: Mapping[str, Any] | None = None,
    secrets: Mapping[str, str] | None = None,
    check: bool = True,
) -> Submission:
    """Finds Spark, packages the code, and completes the configuration.

    :param ref: The pipeline's reference.
    :param run: The run's folder.
    :param folder: The output folder; it must exist until Spark has started.
    :param client_options: Options of the client of the staging root, including secrets.
    :param secrets: Further environment variables of the driver, of sinks.
    :param check: Whether to import the pipeline in a separate process, as the driver will, before
        a JVM starts; not with Spark Connect, whose driver has none.
    :raises BroadwayError: With one sentence on what is missing.
    """
    variables = {name: str(value) for name, value in chosen.env_vars.items()}
    env = {**os.environ, **variables}
    if chosen.master.startswith("sc://"):
        secret = dict(secrets or {}) | _client_variable(client_options)
        return _prepare_connect(chosen, ref, folder, variables | secret)
    program = find_spark(chosen.binary, env)
    env = {**program.env, **env}
    client, pods = chosen.deploy_mode == "client", chosen.master.startswith("k8s:")
    file_conf = file_settings(chosen.properties_file, env, program.binary)
    check_classic(env, {**file_conf, **chosen.conf})
    if program.bundled:
        check_java(env)
    own = _paths(chosen.py_files)
    shipment = ship(str(ref["class"]), folder)
    log.info("Shipping the packages %s to Spark.", shipment.packages)
    if check:
        _check(ref, shipment, own)
    code = [str(shipment.launcher), str(shipment.zip)]
    conf = {**chosen.conf, **default_conf(chosen.master, chosen.conf, file_conf)}
    if pods and not client and UPLOAD_PATH not in {**file_conf, **conf}:
        check_remote({"py_files": chosen.py_files, **chosen.files})
        code = [publish(shipment.launcher, run), publish(shipment.zip, run)]
        settings = s3a_settings(run.spark_uri(), public_options(client_options or {}))
        conf = {f"spark.hadoop.{name}": value for name, value in settings.items()} | conf
    secret = dict(secrets or {}) | _client_variable(client_options)
    # With Kubernetes the provider has them for drivers in pods only.
    variables = program.env | (variables if client else {})
    if client:
        variables |= python_variables(conf, env, pods=pods) | secret
    elif secret:
        log.warning(
            "In cluster mode no credentials are handed to Spark: it uses its own chain of"
            " providers for %s; not handed over: %s.",
            run.spark_uri(),
            ", ".join(secret),
        )
    return Submission(
        program=program,
        application=code[0],
        py_files=",".join([code[1], *own]),
        conf=conf,
        variables=variables,
    )


def _client_variable(options: Mapping[str, Any] | None) -> dict[str, str]:
    return {CLIENT_VARIABLE: json.dumps(dict(options))} if options else {}


def _prepare_connect(
    chosen: Chosen, ref: Mapping[str, Any], folder: Path, variables: dict[str, str]
) -> Submission:
    """Prepares a driver that is a client of a Spark Connect server: it needs neither Java nor
    spark-submit.
    """
    for option, files in {"py_files": chosen.py_files, **chosen.files}.items():
        if "://" in files or (option == "py_files" and ".whl" in files):
            raise OptionsError(option, "local files, of Python .py, .zip or .egg", files)
    own = _paths(chosen.py_files)
    shipment = ship(str(ref["class"]), folder)
    log.info("Shipping the packages %s to Spark Connect.", shipment.packages)
    server = Server(
        url=chosen.master,
        conf={name: str(value) for name, value in chosen.conf.items()},
        artifacts={
            "pyfile": [str(shipment.zip), *own],
            "file": _paths(chosen.files.get("files")),
            "archive": _paths(chosen.files.get("archives")),
        },
    )
    inherited = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = [str(shipment.zip), *import_path(own), inherited]
    variables = variables | {
        VARIABLE: server.dumps(),
        "SPARK_CONNECT_MODE_ENABLED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    return Submission(
        program=SparkProgram(binary=sys.executable, bundled=False),
        application=str(shipment.launcher),
        py_files="",
        conf={},
        variables=variables,
    )


def _paths(text: str | None) -> list[str]:
    return [path.strip() for path in (text or "").split(",") if path.strip()]


def _check(ref: Mapping[str, Any], shipment: Shipment, own: list[str]) -> None:
    if any("://" in file for file in own):  # remote files cannot be imported here
        return
    for warning in check_import(ref, shipment, py_files=own):
        log.warning("%s", warning)
