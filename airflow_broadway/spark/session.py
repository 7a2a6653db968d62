"""The session of an application and its jobs, and the exit codes of its driver.

An application refuses Spark Connect, because the pipeline's code would not be available on the
server.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.log_context import keep_ids

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Exit codes; 0 if every batch has an outcome.
INCOMPLETE, REFUSED, INTERRUPTED = 1, 2, 130

#: The error for Spark Connect, with the way out.
NO_CONNECT = (
    "Spark Connect is not supported yet; take it out, and run on a classic master (local[*], yarn,"
    " spark://… or k8s://…)"
)

#: Default settings of a session; the application's configuration takes precedence.
SETTINGS = {
    # received_at, and every timestamp formatted or truncated by callbacks, is in UTC.
    "spark.sql.session.timeZone": "UTC",
    # Explicit files are never listed by a Spark job, regardless of their number.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
    "spark.sql.parquet.filterPushdown": "true",
    "spark.sql.adaptive.enabled": "true",
}


def open_session() -> SparkSession:
    """Opens the driver's session.

    :raises PipelineError: If it would be one of Spark Connect.
    """
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"):
        if os.environ.get(name):
            raise PipelineError(f"{name} is set for the driver: {NO_CONNECT}")
    conf = SparkConf()
    for name, value in {"spark.scheduler.mode": "FAIR", **SETTINGS}.items():
        conf.setIfMissing(name, value)
    session: SparkSession = SparkSession.builder.config(conf=conf).getOrCreate()
    if ".connect." in type(session).__module__:
        raise PipelineError(f"the driver's session is one of Spark Connect: {NO_CONNECT}")
    _silence_pools(session)
    return session


def _silence_pools(session: Any) -> None:
    """Suppresses the warning that a pool has no file: pools are created on demand."""
    with suppress(Exception):  # affects the log only
        log4j = session._jvm.org.apache.logging.log4j
        name = "org.apache.spark.scheduler.FairSchedulableBuilder"
        log4j.core.config.Configurator.setLevel(name, log4j.Level.ERROR)


def why_lost(spark: Any) -> str:
    """Returns why Spark is lost; empty while it is usable."""
    try:
        if spark._jsc.sc().isStopped():  # there is no public way to ask
            return "the SparkContext was stopped"
    except Exception as error:
        return f"Spark is gone ({type(error).__name__}: {str(error).splitlines()[:1]})"
    return ""


def make_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Creates a daemon thread that may start Spark jobs."""
    from pyspark import InheritableThread

    # Also closes the JVM's half of the thread at its end.
    thread: Any = InheritableThread(target=keep_ids(target), name=name)
    thread.daemon = True
    return thread  # type: ignore[no-any-return]


def name_jobs(session: SparkSession, batch_id: str, description: str, pool: str) -> None:
    """Assigns the jobs of this thread to a group, for :func:`cancel_jobs`.

    :param description: Their description in Spark's UI.
    :param pool: Their scheduler pool.
    """
    context = session.sparkContext
    context.setJobGroup(batch_id, description, interruptOnCancel=True)
    context.setLocalProperty("spark.scheduler.pool", pool)


def cancel_jobs(spark: SparkSession, batch_id: str) -> None:
    """Cancels the jobs of a batch; best effort."""
    with suppress(Exception):
        spark.sparkContext.cancelJobGroup(batch_id)
