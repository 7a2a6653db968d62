"""One Spark application: everything a run has for Spark to do.

::

    spark-submit … launcher.py --run file:///data/broadway/flights/… --work work/<task>-<try>.json

It runs every planned batch that has no outcome yet, ``concurrency`` at a time for each batcher and
all batchers beside each other, and ends with 0 when each batch has an outcome, a failed one
included.  What has none is named in the log; a later try runs only that.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow_broadway import __version__
from airflow_broadway.core.broadway import Broadway
from airflow_broadway.core.errors import BroadwayError, PipelineError, StagingError
from airflow_broadway.core.manifest import Files, Work
from airflow_broadway.spark.files import local_path, open_files
from airflow_broadway.spark.work import REFUSED, run_work

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


__all__ = ["MIN_SPARK", "main"]

log = logging.getLogger("airflow_broadway.spark")

MIN_SPARK = (3, 5)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the application; returns its exit code."""
    parser = argparse.ArgumentParser(prog="airflow-broadway-spark", description=__doc__)
    parser.add_argument("--run", help="URI of the run's folder")
    parser.add_argument("--work", help="path of the work file in it")
    parser.add_argument("--host", default="?", help="who wrote the work file")
    parser.add_argument("--check", help="only load this pipeline reference (JSON); needs no Spark")
    given = parser.parse_args(argv)
    if given.check:
        return _check(given.check)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("py4j").setLevel(logging.WARNING)
    try:
        return _run(given.run, given.work, given.host)
    except (BroadwayError, OSError) as error:
        log.error("%s", error)
        return REFUSED


def _check(reference: str) -> int:
    """Load a pipeline, as the operator does before it starts a JVM: prints what is wrong."""
    try:
        Broadway.load(json.loads(reference))
    except BroadwayError as error:
        print(error, file=sys.stderr)  # noqa: T201 - this is what the operator reads
        return REFUSED
    if "airflow" in sys.modules:
        print(  # noqa: T201
            "The pipeline's module imports Airflow: that costs the driver seconds, and fails where"
            " it is not installed."
        )
    return 0


def _run(uri: str, path: str, host: str) -> int:
    log.info("%s", _versions())
    files: Files | None = None
    if local_path(uri) is not None:  # no need to wait for a session to find that nothing is there
        files = open_files(uri)
        _read_work(files, uri, path, host)
    spark = _session()
    try:
        from airflow_broadway.spark.frame import prepare_session

        prepare_session(spark)
        files = files or open_files(uri, spark)
        return run_work(spark, uri, files, _read_work(files, uri, path, host))
    finally:
        with suppress(Exception):
            spark.stop()


def _versions() -> str:
    """The first line of the log.

    :raises PipelineError: If there is no Spark, or one too old.
    """
    try:
        import pyspark
    except ImportError as error:
        raise PipelineError(
            f"pyspark cannot be imported by {sys.executable}: {error}; start this with spark-submit"
        ) from error
    text = (
        f"airflow-broadway {__version__} on Python {platform.python_version()}"
        f" ({sys.executable}), Spark {pyspark.__version__}, host {platform.node()}"
    )
    numbers = tuple(int(part) for part in pyspark.__version__.split(".")[:2] if part.isdigit())
    if numbers < MIN_SPARK:
        wanted = ".".join(map(str, MIN_SPARK))
        raise PipelineError(f"{text}: Spark {wanted} or newer is needed")
    return text


def _read_work(files: Files, uri: str, path: str, host: str) -> Work:
    try:
        work = Work.loads(files.read(path), path)
    except FileNotFoundError:
        raise StagingError(
            f"{uri}/{path}, written on host {host!r}, is not there for the Spark driver on host"
            f" {platform.node()!r}: every task and the driver must see the same staging root; set"
            " [broadway] staging to one that they share"
        ) from None
    if work.package_version and work.package_version != __version__:
        raise PipelineError(
            f"the task was planned by airflow-broadway {work.package_version}, but the driver has"
            f" {__version__}: another copy stands before the one that was shipped on sys.path"
        )
    return work


def _session() -> SparkSession:
    from pyspark.sql import SparkSession

    from airflow_broadway.spark.frame import SETTINGS

    builder: Any = SparkSession.builder
    if "SPARK_REMOTE" not in os.environ and "SPARK_CONNECT_MODE_ENABLED" not in os.environ:
        from pyspark import SparkConf

        conf = SparkConf()
        for name, value in {"spark.scheduler.mode": "FAIR", **SETTINGS}.items():
            conf.setIfMissing(name, value)
        builder = builder.config(conf=conf)
    session: SparkSession = builder.getOrCreate()
    _silence_pools(session)
    return session


def _silence_pools(session: Any) -> None:
    """Keep out of the log that a pool has no file of its own: pools are made as they are needed."""
    with suppress(Exception):  # a matter of taste, and not at hand under Spark Connect
        log4j = session._jvm.org.apache.logging.log4j
        name = "org.apache.spark.scheduler.FairSchedulableBuilder"
        log4j.core.config.Configurator.setLevel(name, log4j.Level.ERROR)


if __name__ == "__main__":
    sys.exit(main())
