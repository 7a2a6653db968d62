"""The Spark side of a pipeline: the submitting task, the driver, and a shared JVM.

In production the task starts ``spark-submit``, which starts a JVM, which starts the driver, a
Python process.  Here, too, the task and the driver are two processes, each with its own points, and
the driver runs :func:`airflow_broadway.spark.job.main` unchanged.  Only the JVM is shared by all
cases.  It outlives the drivers, so a task cancels the jobs of its dead driver.

I/O of the JVM is no point, because custody does not depend on it.  Neither is the zip file that the
task packs for the driver: without it no driver starts.  The driver's periodic check for later tries
is disabled, so that the order of calls is the same in every run; the checks before and after each
batch remain.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import class_path
from airflow_broadway.runs.ports import Task
from airflow_broadway.runs.spark_batches import Ending, SparkBatches
from airflow_broadway.spark import job
from airflow_broadway.spark.session import ClassicSessions
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.testing.crashes.interceptor import Interceptor, replace

log = logging.getLogger(__name__)

#: Settings for small queries.
_SUBMIT: Final = (
    "--master local[2] --driver-memory 1g"
    " --conf spark.ui.enabled=false"
    " --conf spark.sql.shuffle.partitions=1"
    " --conf spark.sql.codegen.wholeStage=false"
    " --conf spark.sql.codegen.factoryMode=NO_CODEGEN"
    " --driver-java-options -XX:TieredStopAtLevel=1"
    " pyspark-shell"
)
#: Starts the JVM and its session, prints its address, and keeps it until its input ends.
_KEEPER: Final = """
import sys
from airflow_broadway.spark.session import open_session
gateway = open_session().sparkContext._gateway
print(gateway.java_parameters.port, gateway.java_parameters.auth_token, flush=True)
sys.stdin.read()
"""
#: The timeout for Spark to cancel jobs, in seconds.
_END_TIMEOUT: Final = 30.0
#: The environment variables with the JVM's address, as in production.
_PORT, _SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"


def uses_spark(pipeline: type[Pipeline]) -> bool:
    """Returns whether a batcher of the pipeline runs on Spark."""
    return any(batcher.engine == "spark" for batcher in pipeline.batchers.values())


# -- the JVM ---------------------------------------------------------------------------------------


@contextmanager
def warm_spark() -> Iterator[None]:
    """Keeps a JVM for the drivers that this process and its forks start.

    This process itself never connects, because its forks cannot share a connection.
    """
    keeper = subprocess.Popen(
        [sys.executable, "-c", _KEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={
            **os.environ,
            "PYSPARK_SUBMIT_ARGS": _SUBMIT,
            "PYSPARK_PIN_THREAD": "true",
            # Spark's Python workers have the same import path.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYSPARK_PYTHON": sys.executable,
        },
        text=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        address = keeper.stdout.readline().split()
        if len(address) != 2:
            raise RuntimeError("no JVM for Spark could be started")
        os.environ[_PORT], os.environ[_SECRET] = address
        yield
    finally:
        for name in (_PORT, _SECRET):
            os.environ.pop(name, None)
        keeper.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            keeper.wait(20.0)
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()


def _attach() -> None:
    """Attaches this process to the session of the running JVM."""
    from pyspark import SparkConf, SparkContext, java_gateway
    from pyspark.sql import SparkSession

    if _PORT not in os.environ:
        raise RuntimeError("a pipeline with a Spark batcher runs within warm_spark()")
    pyspark: Any = java_gateway
    gateway = pyspark.launch_gateway()
    jvm = gateway.jvm
    context = jvm.JavaSparkContext.fromSparkContext(jvm.org.apache.spark.SparkContext.getOrCreate())
    SparkContext(gateway=gateway, jsc=context, conf=SparkConf(_jconf=context.getConf()))
    session: Any = SparkSession
    session.stop = lambda session: None  # shared with the other drivers


# -- the driver ------------------------------------------------------------------------------------


class Driver:
    """A process that waits to become the driver of one application.

    It is forked while its parent has a single thread, and exits if the parent ends before use.

    :param lock: A file that all drivers lock until they end.
    """

    def __init__(self, lock: Path) -> None:
        self._read, self._write = os.pipe()
        handle = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        #: 0 in the driver itself.
        self.pid = os.fork()
        if self.pid:
            os.close(self._read)
        else:
            os.close(self._write)
            os.write(handle, f"{os.getpid()}\n".encode())

    def arguments(self) -> tuple[list[str], float]:
        """Waits, in the driver, for the application's arguments and the clock offset; exits if none
        arrive.
        """
        with os.fdopen(self._read, "rb") as pipe:
            text = pipe.read()
        if not text:
            os._exit(0)
        arguments, clock_offset = json.loads(text)
        return arguments, clock_offset

    def begin(self, arguments: list[str], clock_offset: float) -> None:
        """Starts the driver, with its clock offset."""
        os.write(self._write, json.dumps([arguments, clock_offset]).encode())
        os.close(self._write)

    def end(self, interceptor: Interceptor) -> str:
        """Waits until the driver ends; returns the reason, empty on success.

        While the driver is suspended, this process is, too.
        """
        while True:
            _, status = os.waitpid(self.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            os.kill(os.getpid(), signal.SIGSTOP)
            interceptor.on_resume()
            os.kill(self.pid, signal.SIGCONT)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            _cancel_jobs(self.pid)
        return f"exit code {code}" if code else ""


def run_driver(arguments: list[str]) -> int:
    """Runs the application of :mod:`airflow_broadway.spark.job`; returns its exit code."""
    from airflow_broadway.spark import application  # loads pyspark

    run_work: Any = application.run_work
    run_work.__kwdefaults__["watch_interval"] = 1e6
    _attach()
    replace(ClassicSessions, "open", _tagging)
    return job.main(arguments)


def _tagging(open_session: Any) -> Any:
    """Tags each job with its driver."""

    def opened(sessions: Any, *args: Any) -> Any:
        session = open_session(sessions, *args)
        session.sparkContext.addJobTag(_tag(os.getpid()))
        return session

    return opened


def _tag(pid: int) -> str:
    return f"driver-{pid}"


def _cancel_jobs(pid: int) -> None:
    """Cancels the jobs of a dead driver; in production they end with its JVM."""
    from pyspark import java_gateway

    pyspark: Any = java_gateway
    context = pyspark.launch_gateway().jvm.org.apache.spark.SparkContext.getOrCreate()
    context.cancelJobsWithTag(_tag(pid))
    tracker = context.statusTracker()
    limit = time.monotonic() + _END_TIMEOUT
    while set(tracker.getActiveJobIds()) & set(tracker.getJobIdsForTag(_tag(pid))):
        if time.monotonic() > limit:
            raise RuntimeError("the jobs of a dead driver do not end")
        time.sleep(0.01)


def wait_for_drivers(lock: Path, patience: float) -> bool:
    """Waits until every driver has ended; otherwise kills them and returns ``False``."""
    if not lock.exists():
        return True
    limit = time.monotonic() + patience
    with lock.open() as file:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() > limit:
                break
            time.sleep(0.01)
        for pid in map(int, file.read().split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return False


# -- the submitting task ---------------------------------------------------------------------------


def run_batches(batches: SparkBatches, submit: Callable[[], str]) -> dict[str, Any] | None:
    """Works as :class:`operators.spark_submit.BroadwaySparkSubmitOperator`, without Airflow.

    :param submit: Runs the application; returns the reason of its end, empty on success.
    :returns: The reference; ``None`` without batches.
    :raises _Incomplete: If batches without an outcome can be retried.
    """
    ending, error = batches.begin(), ""
    if ending is Ending.OPEN:
        with batches.leases_kept():
            error = submit()
        ending = batches.end()
    if ending is Ending.OPEN:
        raise _Incomplete(error)
    # Batches that can never get an outcome do not block the rest of the run.
    return None if ending is Ending.EMPTY else batches.plans.reference()


def submit(
    batches: SparkBatches,
    run: StagedRun,
    pipeline: Pipeline,
    task: Task,
    driver: Driver,
    interceptor: Interceptor,
) -> str:
    """Runs the application in a driver; returns the reason of its end, empty on success."""
    # Options that are not JSON are set on the class, also in the driver.
    ref = {"class": class_path(type(pipeline)), "options": {}}
    info = RunInfo(dag_id=run.dag_id, run_id=run.run_id)
    work = batches.write_work(task.file_name, ref, info)
    arguments = job.arguments_of(run.spark_uri(), *work)

    def begin() -> None:
        driver.begin(arguments, interceptor.clock_offset)

    def do() -> str:
        begin()
        return driver.end(interceptor)

    try:
        # Half: the task dies, and its driver continues.
        return interceptor.call("driver", "", do, half=begin, error=_Lost)
    except _Lost:
        return "a fault was injected into spark-submit"


class _Lost(Exception):
    """``spark-submit`` could not be started, or was lost."""


class _Incomplete(Exception):
    """Batches have no outcome."""
