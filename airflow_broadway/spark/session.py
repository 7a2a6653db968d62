"""Spark sessions, classic and of Spark Connect, and all differences between the two.

An application refuses Spark Connect, because the pipeline's code would not be available on the
server.  The handling of batches already supports it.
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


def _is_connect(spark: Any) -> bool:
    """Returns whether a session is one of Spark Connect, without access to a JVM."""
    return ".connect." in type(spark).__module__


# -- the application's session ---------------------------------------------------------------------


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
    if _is_connect(session):
        raise PipelineError(f"the driver's session is one of Spark Connect: {NO_CONNECT}")
    _silence_pools(session)
    return session


def _silence_pools(session: Any) -> None:
    """Suppresses the warning that a pool has no file: pools are created on demand."""
    with suppress(Exception):  # affects the log only
        log4j = session._jvm.org.apache.logging.log4j
        name = "org.apache.spark.scheduler.FairSchedulableBuilder"
        log4j.core.config.Configurator.setLevel(name, log4j.Level.ERROR)


def prepare_session(spark: SparkSession) -> None:
    """Applies the settings to a Connect session; a classic one has them from its start."""
    if _is_connect(spark):
        for name, value in SETTINGS.items():
            spark.conf.set(name, value)


def application_id(spark: SparkSession) -> str:
    """Returns Spark's application id; empty under Connect."""
    return "" if _is_connect(spark) else str(spark.sparkContext.applicationId)


def ui_address(spark: SparkSession) -> str:
    """Returns the URL of the application's UI; empty if it has none, or under Connect."""
    return "" if _is_connect(spark) else str(spark.sparkContext.uiWebUrl or "")


def why_lost(spark: Any) -> str:
    """Returns why Spark is lost; empty while it is usable."""
    try:
        if _is_connect(spark):
            if spark.is_stopped:
                return "the Spark Connect session was stopped"
            spark.conf.get("spark.sql.session.timeZone", None)
            return ""
        if spark._jsc.sc().isStopped():  # there is no public way to ask
            return "the SparkContext was stopped"
    except Exception as error:
        return f"Spark is gone ({type(error).__name__}: {str(error).splitlines()[:1]})"
    return ""


def make_thread(spark: Any, name: str, target: Callable[[], None]) -> threading.Thread:
    """Creates a daemon thread that may start Spark jobs."""
    target = keep_ids(target)
    if _is_connect(spark):
        return threading.Thread(target=target, name=name, daemon=True)
    from pyspark import InheritableThread

    # Also closes the JVM's half of the thread at its end.
    thread: Any = InheritableThread(target=target, name=name)
    thread.daemon = True
    return thread  # type: ignore[no-any-return]


# -- a batch's session -----------------------------------------------------------------------------


def new_session(spark: SparkSession) -> SparkSession:
    """Creates a session for one batch, with separate temporary views and settings."""
    session: Any = spark
    if not _is_connect(spark):
        session = spark.newSession()
    elif hasattr(spark, "cloneSession"):
        session = spark.cloneSession()
    else:  # Spark Connect before 4.1
        session = type(spark).builder.remote(spark.client._builder.url).create()  # type: ignore[attr-defined]
        prepare_session(session)
    return session  # type: ignore[no-any-return]


def end_session(spark: Any) -> None:
    """Releases a batch's session.

    A classic session ends with its last reference; the Connect server keeps one until it is
    released.
    """
    if _is_connect(spark):
        with suppress(Exception):
            spark.client.release_session()
            spark.client.close()


def name_jobs(session: SparkSession, batch_id: str, description: str, pool: str) -> None:
    """Assigns the jobs of this thread to a group, for :func:`cancel_jobs`.

    :param description: Their description in Spark's UI.
    :param pool: Their scheduler pool.
    """
    if _is_connect(session):
        session.addTag(batch_id)
        return
    context = session.sparkContext
    context.setJobGroup(batch_id, description, interruptOnCancel=True)
    context.setLocalProperty("spark.scheduler.pool", pool)


def cancel_jobs(spark: Any, batch_id: str) -> None:
    """Cancels the jobs of a batch; best effort."""
    with suppress(Exception):
        if _is_connect(spark):
            spark.interruptTag(batch_id)
        else:
            spark.sparkContext.cancelJobGroup(batch_id)
