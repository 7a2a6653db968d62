"""The environment of Spark on a worker: the program, its Java, its Python, its settings.

Errors are detected before a JVM starts, and reported in one sentence.
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

from airflow_broadway.core.errors import BroadwayError, ConnectionMissing, OptionsError
from airflow_broadway.spark.session import USE_REMOTE

#: The oldest version of Java that Spark supports.
MIN_JAVA = 17

#: For a local master, where startup dominates: half the CPU of Java's defaults.
LIGHT_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

#: Without it a driver hangs forever when a thread of Spark runs out of memory.
EXIT_ON_OUT_OF_MEMORY = "-XX:+ExitOnOutOfMemoryError"
#: Precedes spark.driver.extraJavaOptions in every deploy mode, so that users' flags win.
_DEFAULT_OPTIONS = "spark.driver.defaultJavaOptions"

_MASTER = re.compile(r"local(\[.*\])?|yarn|spark://.+|k8s://.+")
DEPLOY_MODES = ("client", "cluster")


class SparkMissing(BroadwayError):
    """This worker has no Spark, or no suitable Java."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkProgram:
    """The spark-submit program of this worker.

    :param binary: The program, with its path if necessary.
    :param bundled: Whether it belongs to the worker's own ``pyspark``.
    :param env: Its environment variables; they never override existing ones.
    """

    binary: str
    bundled: bool
    env: dict[str, str] = field(default_factory=dict)


def check_master(conn_id: str, master: str, deploy_mode: str) -> None:
    """Checks the master URL of a connection, and the deploy mode there.

    :raises ConnectionMissing: Naming the connection and the supported forms.
    :raises OptionsError: If the master cannot run a driver in Python in this deploy mode.
    """
    if _MASTER.fullmatch(master):
        modes = DEPLOY_MODES if master.startswith(("yarn", "k8s:")) else DEPLOY_MODES[:1]
        if deploy_mode not in modes:
            raise OptionsError(
                "deploy_mode",
                f"{' or '.join(map(repr, modes))} with the master {master!r} of the connection"
                f" {conn_id!r} (its extra deploy-mode, or deploy_mode of the operator): a driver in"
                " Python runs on the cluster with yarn and k8s:// only",
                deploy_mode,
            )
        return
    if master.startswith("sc://"):
        raise ConnectionMissing(f"the connection {conn_id!r} gives {master!r}: {USE_REMOTE}")
    raise ConnectionMissing(
        f"the connection {conn_id!r} gives the Spark master {master!r}; expected local[*], yarn,"
        " spark://host:7077 or k8s://https://host: put it into the connection's host"
    )


def check_classic(env: Mapping[str, str], conf: Mapping[str, Any]) -> None:
    """Checks that the driver would not get a session of Spark Connect.

    :raises SparkMissing: Naming the variable or setting that requests it.
    """
    causes = [name for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED") if env.get(name)]
    causes += [name for name in ("spark.remote",) if conf.get(name)]
    if str(conf.get("spark.api.mode", "")).lower() == "connect":
        causes.append("spark.api.mode=connect")
    if causes:
        raise SparkMissing(f"{causes[0]} is set for the driver: {USE_REMOTE}")


def find_spark(binary: str, env: Mapping[str, str]) -> SparkProgram:
    """Finds the program and its Spark installation.

    The order is ``SPARK_HOME``, then a program on PATH outside this Python environment, then the
    installed ``pyspark``, whose start script fails unless its environment is active.

    :raises SparkMissing: If there is none.
    """
    home = env.get("SPARK_HOME")
    if home and (Path(home) / "bin" / binary).is_file():
        return SparkProgram(
            binary=str(Path(home) / "bin" / binary), bundled=home == _find_bundled_spark()
        )
    path = shutil.which(binary, path=env.get("PATH"))
    own = path is not None and Path(path).parent.resolve() == Path(sys.executable).parent.resolve()
    if path and not own:
        return SparkProgram(binary=path, bundled=False)
    bundled = _find_bundled_spark()
    if bundled and (Path(bundled) / "bin" / binary).is_file():
        return SparkProgram(
            binary=str(Path(bundled) / "bin" / binary), bundled=True, env={"SPARK_HOME": bundled}
        )
    raise SparkMissing(
        f"{binary!r} is neither on PATH nor in SPARK_HOME, and this worker's Python has no pyspark"
        f" with it ({sys.executable}): pip install pyspark, of the same version as pyspark-client"
    )


def _find_bundled_spark() -> str | None:
    """Returns the folder of the installed ``pyspark``, if it is more than the client."""
    try:
        spec = importlib.util.find_spec("pyspark")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "jars").is_dir():
            return folder
    return None


def check_java(env: Mapping[str, str]) -> None:
    """Checks that a Java for the bundled Spark is available.

    :raises SparkMissing: Naming the missing program, version or module.
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
        result = subprocess.run(
            [java, "--list-modules"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SparkMissing(f"{java} cannot be run ({error}): {cure}") from error
    modules = result.stdout.split()
    version = next((m.partition("@")[2] for m in modules if m.startswith("java.base@")), "")
    number = re.match(r"\d+", version)
    if result.returncode or number is None or int(number[0]) < MIN_JAVA:
        found_version = version or (result.stderr.strip().splitlines() or ["an unknown version"])[0]
        raise SparkMissing(f"{java} is too old for Spark ({found_version}; {where}): {cure}")
    if not any(module.startswith("jdk.incubator.vector") for module in modules):
        raise SparkMissing(
            f"{java} (version {version}) lacks the module jdk.incubator.vector, without which Spark"
            f" does not start; some slim builds leave it out: {cure}"
        )


def default_conf(
    master: str, operator_conf: Mapping[str, Any], file_conf: Mapping[str, str]
) -> dict[str, str]:
    """Returns default settings, except those set by the operator, a properties file, or Spark's
    defaults file.

    Java's default options are always included, preceded by the flag that ends a driver without
    memory.

    :param master: The Spark master's URL.
    :param operator_conf: The operator's ``conf``.
    :param file_conf: The result of :func:`file_settings`.
    """
    conf = {"spark.scheduler.mode": "FAIR"}
    if master == "yarn":
        # The task starts the next application: it knows which batches have died.
        conf["spark.yarn.maxAppAttempts"] = "1"
    if master.startswith("local"):
        conf |= {
            "spark.driver.extraJavaOptions": LIGHT_JVM,
            "spark.log.level": "WARN",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            # Adaptive execution merges them again; a local batch never needs Spark's 200.
            "spark.sql.shuffle.partitions": "8",
        }
    options = str(operator_conf.get(_DEFAULT_OPTIONS) or file_conf.get(_DEFAULT_OPTIONS) or "")
    if "ExitOnOutOfMemoryError" not in options:
        options = f"{EXIT_ON_OUT_OF_MEMORY} {options}".strip()
    conf = {n: value for n, value in conf.items() if n not in {**operator_conf, **file_conf}}
    return {**conf, _DEFAULT_OPTIONS: options}


def file_settings(
    properties_file: str | None, env: Mapping[str, str], binary: str = ""
) -> dict[str, str]:
    """Reads the settings of a properties file, or of Spark's defaults file.

    :param properties_file: The operator's file, which replaces Spark's defaults file.
    :param env: The program's environment variables.
    :param binary: The program, with its path if known, which locates the defaults file.
    """
    if properties_file:
        return _read_settings(Path(properties_file))
    if env.get("SPARK_CONF_DIR"):
        return _read_settings(Path(env["SPARK_CONF_DIR"]) / "spark-defaults.conf")
    home = Path(env["SPARK_HOME"]) if env.get("SPARK_HOME") else None
    if home is None and os.path.isabs(binary):
        home = Path(binary).resolve().parent.parent
    return _read_settings(home / "conf" / "spark-defaults.conf") if home else {}


def _read_settings(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    text = re.sub(r"\\\r?\n\s*", "", text)  # line continuation
    lines = (line.strip() for line in text.splitlines())
    parts = (
        re.split(r"\s*[\s=:]\s*", line, maxsplit=1)
        for line in lines
        if line and line[0] not in "#!"
    )
    return {name: "".join(value) for name, *value in parts}


def python_variables(
    conf: Mapping[str, Any], env: Mapping[str, str], *, pods: bool = False
) -> dict[str, str]:
    """Returns variables with the worker's Python, for driver and executors unless configured.

    :param pods: Whether executors have the Python of their image.
    """
    variables: dict[str, str] = {}
    if "spark.pyspark.driver.python" not in conf and "PYSPARK_DRIVER_PYTHON" not in env:
        variables["PYSPARK_DRIVER_PYTHON"] = env.get("PYSPARK_PYTHON", sys.executable)
    if "spark.pyspark.python" not in conf and "PYSPARK_PYTHON" not in env:
        variables["PYSPARK_PYTHON"] = "python3" if pods else sys.executable
    return variables
