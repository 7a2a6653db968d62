"""What a worker needs to start Spark: the program, its Java, its Python, its settings.

Everything that can be wrong here is found before a JVM starts, and said in one sentence.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_broadway.core.custody.producer import Connection
from airflow_broadway.core.errors import BroadwayError, ConnectionMissing
from airflow_broadway.spark.session import NO_CONNECT

#: The oldest Java that Spark runs on.
MIN_JAVA = 17

#: For a local master, most of whose time goes into starting: half the CPU of Java's own defaults.
LIGHT_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

#: Without it a driver waits for ever when one of Spark's own threads has run out of memory.
EXIT_ON_OUT_OF_MEMORY = "-XX:+ExitOnOutOfMemoryError"
#: Java gets these before spark.driver.extraJavaOptions, in every deploy mode: users' flags win.
_DEFAULT_OPTIONS = "spark.driver.defaultJavaOptions"

_MASTER = re.compile(r"local(\[.*\])?|yarn.*|spark://.+|k8s://.+|mesos://.+")


class SparkMissing(BroadwayError):
    """This worker has no Spark, or no Java that runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkProgram:
    """How Spark is started here.

    :param binary: The program, with its path where that is needed.
    :param bundled: Whether it is the one of the worker's own ``pyspark``.
    :param env: Variables for it; they never override what is set.
    """

    binary: str
    bundled: bool
    env: dict[str, str] = field(default_factory=dict)


def check_master(conn_id: str, master: str) -> str:
    """Return a master's URL that spark-submit takes.

    :raises ConnectionMissing: Naming the connection and the forms there are.
    """
    if _MASTER.fullmatch(master):
        return master
    if master.startswith("sc://"):
        raise ConnectionMissing(f"the connection {conn_id!r} gives {master!r}: {NO_CONNECT}")
    raise ConnectionMissing(
        f"the connection {conn_id!r} gives the Spark master {master!r}; expected local[*], yarn,"
        " spark://host:7077 or k8s://https://host: put it into the connection's host"
    )


def check_classic(env: Mapping[str, str], conf: Mapping[str, Any]) -> None:
    """Return unless the driver would get a session of Spark Connect.

    :raises SparkMissing: Naming what asks for it.
    """
    asked = [name for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED") if env.get(name)]
    asked += [name for name in ("spark.remote",) if conf.get(name)]
    if str(conf.get("spark.api.mode", "")).lower() == "connect":
        asked.append("spark.api.mode=connect")
    if asked:
        raise SparkMissing(f"{asked[0]} is set for the driver: {NO_CONNECT}")


def find_spark(binary: str, env: Mapping[str, str]) -> SparkProgram:
    """Find the program, and the Spark it belongs to.

    ``SPARK_HOME`` wins; then a program on PATH that is not this Python's own; then the ``pyspark``
    that is installed here, whose start script fails unless its environment is active.

    :raises SparkMissing: If there is none.
    """
    home = env.get("SPARK_HOME")
    if home and (Path(home) / "bin" / binary).is_file():
        return SparkProgram(binary=str(Path(home) / "bin" / binary), bundled=home == _bundled())
    found = shutil.which(binary, path=env.get("PATH"))
    own = (
        found is not None and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()
    )
    if found and not own:
        return SparkProgram(binary=found, bundled=False)
    bundled = _bundled()
    if bundled and (Path(bundled) / "bin" / binary).is_file():
        return SparkProgram(
            binary=str(Path(bundled) / "bin" / binary), bundled=True, env={"SPARK_HOME": bundled}
        )
    raise SparkMissing(
        f"{binary!r} is neither on PATH nor in SPARK_HOME, and this worker's Python has no pyspark"
        f" with it ({sys.executable}): pip install pyspark, of the same version as pyspark-client"
    )


def _bundled() -> str | None:
    """The folder of the ``pyspark`` installed here, if it is the whole and not only the client."""
    try:
        found = importlib.util.find_spec("pyspark")
    except (ImportError, ValueError):
        return None
    for folder in (found.submodule_search_locations or []) if found else []:
        if (Path(folder) / "jars").is_dir():
            return folder
    return None


def check_java(env: Mapping[str, str]) -> None:
    """Return if there is a Java that runs the bundled Spark.

    :raises SparkMissing: Saying which is missing, or what the one found lacks.
    """
    home = env.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java", path=env.get("PATH"))
    where = f"JAVA_HOME is {home}" if home else "there is no JAVA_HOME"
    cure = f"install a JRE of version {MIN_JAVA} or newer, such as openjdk-17-jre-headless"
    if home and not os.access(java or "", os.X_OK):
        raise SparkMissing(
            f"JAVA_HOME is {home!r}, but there is no program {java}: set JAVA_HOME to the folder of"
            f" a Java whose bin has it, or unset it and {cure}"
        )
    if not java:
        raise SparkMissing(f"Spark needs Java, and no java program was found ({where}): {cure}")
    try:
        done = subprocess.run(
            [java, "--list-modules"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SparkMissing(f"{java} cannot be run ({error}): {cure}") from error
    modules = done.stdout.split()
    version = next((m.partition("@")[2] for m in modules if m.startswith("java.base@")), "")
    number = re.match(r"\d+", version)
    if done.returncode or number is None or int(number[0]) < MIN_JAVA:
        shown = version or (done.stderr.strip().splitlines() or ["an unknown version"])[0]
        raise SparkMissing(f"{java} is too old for Spark ({shown}; {where}): {cure}")
    if not any(module.startswith("jdk.incubator.vector") for module in modules):
        raise SparkMissing(
            f"{java} (version {version}) lacks the module jdk.incubator.vector, without which Spark"
            f" does not start; some slim builds leave it out: {cure}"
        )


def default_conf(
    master: str, given: Mapping[str, Any], elsewhere: Mapping[str, str]
) -> dict[str, str]:
    """Settings that an application gets unless someone has set them: the operator, a properties
    file, or Spark's own defaults file.

    One is always among them: Java's default options, with the flag that ends a driver whose memory
    has run out before whatever else is in them.

    :param master: The Spark master's URL.
    :param given: The operator's ``conf``.
    :param elsewhere: What :func:`file_settings` found.
    """
    conf = {"spark.scheduler.mode": "FAIR"}
    if master.startswith("local"):
        conf |= {
            "spark.driver.extraJavaOptions": LIGHT_JVM,
            "spark.log.level": "WARN",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            # Adaptive execution merges them again; a local batch never needs Spark's 200.
            "spark.sql.shuffle.partitions": "8",
        }
    options = str(given.get(_DEFAULT_OPTIONS) or elsewhere.get(_DEFAULT_OPTIONS) or "")
    if "ExitOnOutOfMemoryError" not in options:
        options = f"{EXIT_ON_OUT_OF_MEMORY} {options}".strip()
    made = {name: each for name, each in conf.items() if name not in {**given, **elsewhere}}
    return {**made, _DEFAULT_OPTIONS: options}


def file_settings(
    properties_file: str | None, env: Mapping[str, str], binary: str = ""
) -> dict[str, str]:
    """The settings of a properties file, or of Spark's own defaults file.

    :param properties_file: The operator's; Spark then reads no other.
    :param env: Variables of the program.
    :param binary: The program, with its path where that is known: the file of its Spark counts.
    """
    if properties_file:
        return _settings_in(Path(properties_file))
    if env.get("SPARK_CONF_DIR"):
        return _settings_in(Path(env["SPARK_CONF_DIR"]) / "spark-defaults.conf")
    home = Path(env["SPARK_HOME"]) if env.get("SPARK_HOME") else None
    if home is None and os.path.isabs(binary):
        home = Path(binary).resolve().parent.parent
    return _settings_in(home / "conf" / "spark-defaults.conf") if home else {}


def _settings_in(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    text = re.sub(r"\\\r?\n\s*", "", text)  # a line that goes on in the next
    lines = (line.strip() for line in text.splitlines())
    parts = (
        re.split(r"\s*[\s=:]\s*", line, maxsplit=1)
        for line in lines
        if line and line[0] not in "#!"
    )
    return {name: "".join(value) for name, *value in parts}


def s3_settings(
    uri: str, connection: Connection | None, given: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, str]]:
    """What Spark needs to reach a staging root in S3: settings, and secret variables.

    The settings are for the root's bucket alone, so that a lake elsewhere keeps its own.  Secrets
    are never settings, which show on the command line.  They go by the environment of the driver,
    which Spark hands on to its executors.

    :param uri: The root as ``s3a://bucket/…``.
    :param connection: The Airflow AWS connection; ``None``: Spark's own chain of providers.
    :param given: The operator's ``conf``, which wins.
    """
    if connection is None:
        return {}, {}
    extra = connection.extra
    bucket = uri.partition("://")[2].partition("/")[0]
    prefix = f"spark.hadoop.fs.s3a.bucket.{bucket}"
    conf: dict[str, str] = {}
    services = extra.get("service_config") or {}
    endpoint = (services.get("s3") or {}).get("endpoint_url") or extra.get("endpoint_url")
    if endpoint:
        conf[f"{prefix}.endpoint"] = str(endpoint)
        # Hardly a store but AWS has a host of its own for each bucket.
        if "amazonaws.com" not in str(endpoint):
            conf[f"{prefix}.path.style.access"] = "true"
        ssl = not str(endpoint).startswith("http://")
        conf[f"{prefix}.connection.ssl.enabled"] = str(ssl).lower()
    if extra.get("region_name"):
        conf[f"{prefix}.endpoint.region"] = str(extra["region_name"])
    secret: dict[str, str] = {}
    if connection.login and connection.password:
        secret = {
            "AWS_ACCESS_KEY_ID": connection.login,
            "AWS_SECRET_ACCESS_KEY": connection.password,
        }
        if extra.get("aws_session_token"):
            secret["AWS_SESSION_TOKEN"] = str(extra["aws_session_token"])
    return {name: value for name, value in conf.items() if name not in given}, secret


def python_variables(conf: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, str]:
    """Variables that name the worker's Python, for the driver and executors whose is not chosen."""
    made: dict[str, str] = {}
    if "spark.pyspark.driver.python" not in conf and "PYSPARK_DRIVER_PYTHON" not in env:
        made["PYSPARK_DRIVER_PYTHON"] = env.get("PYSPARK_PYTHON", sys.executable)
    if "spark.pyspark.python" not in conf and "PYSPARK_PYTHON" not in env:
        made["PYSPARK_PYTHON"] = sys.executable
    return made
