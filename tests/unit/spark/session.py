"""One Spark session for all tests of a process."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests.server_process import at_end

#: The jars of tables that Spark writes, if ``scripts/setup.sh --tables`` has resolved them.
TABLES = sorted(Path(__file__).parents[3].glob("build/tables/*.jar"))
needs_tables = pytest.mark.skipif(
    not TABLES, reason="no jars of tables for Spark: scripts/setup.sh --tables, which needs mvn"
)


@functools.cache
def spark_session() -> Any:
    """The session; ``local[2]``, with the settings of an application."""
    from airflow_broadway.spark.session import open_session

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "4",
        "spark.driver.extraJavaOptions": "'-XX:TieredStopAtLevel=1 -XX:+UseSerialGC'",
    }
    conf |= tables_conf()
    arguments = " ".join(f"--conf {name}={value}" for name, value in conf.items())
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--master local[2] {arguments} pyspark-shell"
    session = open_session()
    session.sparkContext.setLogLevel("ERROR")
    # It logs when its sockets close, which may be after pytest has closed the log's stream.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    at_end.callback(session.stop)
    return session


def local_cluster_env() -> dict[str, str]:
    """Returns the environment of a driver whose one executor is another process."""
    conf = {
        "spark.ui.enabled": "false",
        "spark.executor.memory": "512m",
        "spark.master.ui.port": "0",
        "spark.worker.ui.port": "0",
        "spark.sql.shuffle.partitions": "1",
    }
    options = " ".join(f"--conf {name}={value}" for name, value in conf.items())
    return {
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": f"--master local-cluster[1,1,1024] {options} pyspark-shell",
    }


def run_application(module: str, folder: Path) -> Any:
    """Runs a module in a process of its own; returns the JSON that it writes to ``result.json``."""
    process = subprocess.run(
        [sys.executable, "-m", module, str(folder)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=480,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())


def tables_conf() -> dict[str, str]:
    """Returns the settings of a session that writes tables; none without their jars."""
    if not TABLES:
        return {}
    return {
        "spark.jars": ",".join(map(str, TABLES)),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",
    }
