"""Sessions of Spark, classic and of Spark Connect: all that the two do differently.

An application refuses Spark Connect, for the pipeline's code would not reach the server.  The
handling of batches is ready for it all the same, so that only the code has to find its way.
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

#: Why Spark Connect is refused, and the cure.
NO_CONNECT = (
    "Spark Connect is not supported yet; take it out, and run on a classic master (local[*], yarn,"
    " spark://… or k8s://…)"
)

#: What a session is set to unless the application's own configuration says otherwise.
SETTINGS = {
    # received_at, and every timestamp that a callback prints or truncates, is UTC.
    "spark.sql.session.timeZone": "UTC",
    # Explicit files are never listed by a Spark job, however many they are.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
    "spark.sql.parquet.filterPushdown": "true",
    "spark.sql.adaptive.enabled": "true",
}


def _is_connect(spark: Any) -> bool:
    """Whether a session is one of Spark Connect, which has no JVM at hand."""
    return ".connect." in type(spark).__module__


# -- the application's session ---------------------------------------------------------------------


def open_session() -> SparkSession:
    """The driver's session.

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
    """Keep out of the log that a pool has no file of its own: pools are made as they are needed."""
    with suppress(Exception):  # only the log would be longer
        log4j = session._jvm.org.apache.logging.log4j
        name = "org.apache.spark.scheduler.FairSchedulableBuilder"
        log4j.core.config.Configurator.setLevel(name, log4j.Level.ERROR)


def prepare_session(spark: SparkSession) -> None:
    """Give a session of Connect the settings; a classic one has them from its start."""
    if _is_connect(spark):
        for name, value in SETTINGS.items():
            spark.conf.set(name, value)


def application_id(spark: SparkSession) -> str:
    """Spark's name of the application; empty under Connect."""
    return "" if _is_connect(spark) else str(spark.sparkContext.applicationId)


def ui_address(spark: SparkSession) -> str:
    """Where the application's UI is while it runs; empty if it has none, or under Connect."""
    return "" if _is_connect(spark) else str(spark.sparkContext.uiWebUrl or "")


def why_lost(spark: Any) -> str:
    """Why Spark can do no more; empty while it can."""
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
    """A daemon thread that may start Spark's jobs."""
    target = keep_ids(target)
    if _is_connect(spark):
        return threading.Thread(target=target, name=name, daemon=True)
    from pyspark import InheritableThread

    # Also closes the JVM's half of the thread at its end.
    made: Any = InheritableThread(target=target, name=name)
    made.daemon = True
    return made  # type: ignore[no-any-return]


# -- a batch's session -----------------------------------------------------------------------------


def new_session(spark: SparkSession) -> SparkSession:
    """A session of a batch's own: its temporary views and settings are seen by no other."""
    made: Any = spark
    if not _is_connect(spark):
        made = spark.newSession()
    elif hasattr(spark, "cloneSession"):
        made = spark.cloneSession()
    else:  # Spark Connect before 4.1
        made = type(spark).builder.remote(spark.client._builder.url).create()  # type: ignore[attr-defined]
        prepare_session(made)
    return made  # type: ignore[no-any-return]


def end_session(spark: Any) -> None:
    """Give a batch's session back.

    A classic one goes with its last reference; the server of Connect keeps one until it is
    released.
    """
    if _is_connect(spark):
        with suppress(Exception):
            spark.client.release_session()
            spark.client.close()


def name_jobs(session: SparkSession, batch_id: str, what: str, pool: str) -> None:
    """Give the jobs that this thread starts a group, by which :func:`cancel_jobs` finds them.

    :param what: What Spark's UI shows.
    :param pool: The scheduler's pool, whose share of the cluster they get.
    """
    if _is_connect(session):
        session.addTag(batch_id)
        return
    context = session.sparkContext
    context.setJobGroup(batch_id, what, interruptOnCancel=True)
    context.setLocalProperty("spark.scheduler.pool", pool)


def cancel_jobs(spark: Any, batch_id: str) -> None:
    """Cancel the jobs of a batch, as far as that can be done."""
    with suppress(Exception):
        if _is_connect(spark):
            spark.interruptTag(batch_id)
        else:
            spark.sparkContext.cancelJobGroup(batch_id)
