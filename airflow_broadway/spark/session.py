"""The sessions of an application whose driver has a JVM, and the exit codes of drivers.

For the sessions of an application on a Spark Connect server see
:mod:`airflow_broadway.spark.connect`.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from airflow_broadway.core.errors import BroadwayError, PipelineError
from airflow_broadway.core.log_context import keep_ids
from airflow_broadway.core.model.message import Status

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Exit codes; 0 if every batch has an outcome.
INCOMPLETE, REFUSED, INTERRUPTED = 1, 2, 130

#: The way to Spark Connect, for errors.
USE_REMOTE = "to use Spark Connect, set remote='sc://…', or a connection of the type spark_connect"

#: PySpark's error for an executor that has another minor version of Python.
_MISMATCH = re.compile(r"\[PYTHON_VERSION_MISMATCH\].*")

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
            raise PipelineError(f"{name} is set for the driver: {USE_REMOTE}")
    conf = SparkConf()
    for name, value in {"spark.scheduler.mode": "FAIR", **SETTINGS}.items():
        conf.setIfMissing(name, value)
    session: SparkSession = SparkSession.builder.config(conf=conf).getOrCreate()
    if ".connect." in type(session).__module__:
        raise PipelineError(f"the driver's session is one of Spark Connect: {USE_REMOTE}")
    _silence_pools(session)
    return session


def _silence_pools(session: Any) -> None:
    """Suppresses the warning that a pool has no file: pools are created on demand."""
    with suppress(Exception):  # affects the log only
        log4j = session._jvm.org.apache.logging.log4j
        name = "org.apache.spark.scheduler.FairSchedulableBuilder"
        log4j.core.config.Configurator.setLevel(name, log4j.Level.ERROR)


class SparkLost(BroadwayError):
    """Spark is lost: running batches have no outcome."""


class PythonMismatch(BroadwayError):
    """An executor has another minor version of Python: no batch that needs it can be handled."""


class Sessions(Protocol):
    """The sessions of an application; used from many threads."""

    @property
    def application_id(self) -> str:
        """The application's id in Spark."""

    def open(self, batch_id: str, description: str, pool: str) -> SparkSession:
        """Opens a session for a batch, with temporary views and settings of its own.

        Jobs that this thread starts belong to the batch.

        :param description: Of its jobs, in Spark's UI.
        :param pool: Their scheduler pool, where Spark has pools for sessions.
        """

    def cancel(self, batch_id: str) -> None:
        """Cancels the jobs of a batch; best effort."""

    def why_lost(self, cause: BaseException | None = None) -> str:
        """Returns why Spark is lost; empty while it is usable.

        :param cause: The error for which this is asked.
        :raises PythonMismatch: If it shows that an executor cannot run the driver's Python.
        """

    def make_thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        """Creates a daemon thread that may start Spark jobs."""


class ClassicSessions:
    """Sessions in the driver's JVM.

    :param spark: The application's session.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    @property
    def application_id(self) -> str:
        return self._spark.sparkContext.applicationId

    def open(self, batch_id: str, description: str, pool: str) -> SparkSession:
        session = self._spark.newSession()
        context = session.sparkContext
        context.setJobGroup(batch_id, description, interruptOnCancel=True)
        context.setLocalProperty("spark.scheduler.pool", pool)
        return session

    def cancel(self, batch_id: str) -> None:
        with suppress(Exception):
            self._spark.sparkContext.cancelJobGroup(batch_id)

    def why_lost(self, cause: BaseException | None = None) -> str:
        spark: Any = self._spark
        try:
            if spark._jsc.sc().isStopped():  # there is no public way to ask
                return "the SparkContext was stopped"
        except Exception as error:
            return f"Spark has ended ({type(error).__name__}: {str(error).splitlines()[:1]})"
        if _MISMATCH.search(Status("error", cause).text):  # a message may hold it: a job shows it
            try:
                spark.sparkContext.range(1).map(abs).first()
            except Exception as error:
                if found := _MISMATCH.search(str(error)):
                    raise PythonMismatch(f"an executor cannot run Python: {found[0]}") from error
        return ""

    def make_thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        from pyspark import InheritableThread

        # Also closes the JVM's half of the thread at its end.
        thread: Any = InheritableThread(target=keep_ids(target), name=name)
        thread.daemon = True
        return thread  # type: ignore[no-any-return]
