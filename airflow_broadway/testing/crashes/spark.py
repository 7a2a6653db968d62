"""A pipeline's Spark side: the task that submits, the driver, and the JVM that stays warm.

In production the task starts ``spark-submit``, which starts a JVM, which starts the driver: a
process of Python.  Here the task and the driver are two processes as well, each with points of its
own, and the driver runs :func:`airflow_broadway.spark.job.main` as it is.  Only the JVM is one for
all cases.  It ends with nobody, so the jobs of a driver that died are ended by its task.

What the JVM writes and reads is no point: it has no part in custody.  Neither is the zip that the
task packs for the driver, in a folder of its own: without it no driver begins.  The driver's look
for later tries, every two seconds, is left out, so that calls come in the same order in every run;
the looks before and after each batch must do.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import class_path
from airflow_broadway.runs.ports import Ports, Task
from airflow_broadway.runs.spark_batches import Ending, SparkBatches
from airflow_broadway.spark import application, job
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.testing.crashes.interceptor import Interceptor, replace

log = logging.getLogger(__name__)

#: Small queries, so nothing that only pays in large ones.
_SUBMIT: Final = (
    "--master local[2] --driver-memory 1g"
    " --conf spark.ui.enabled=false"
    " --conf spark.sql.shuffle.partitions=1"
    " --conf spark.sql.codegen.wholeStage=false"
    " --conf spark.sql.codegen.factoryMode=NO_CODEGEN"
    " --driver-java-options -XX:TieredStopAtLevel=1"
    " pyspark-shell"
)
#: Starts the JVM and its session, says where it is, and keeps it until its input ends.
_KEEPER: Final = """
import sys
from airflow_broadway.spark.session import open_session
gateway = open_session().sparkContext._gateway
print(gateway.java_parameters.port, gateway.java_parameters.auth_token, flush=True)
sys.stdin.read()
"""
#: Seconds for Spark to end jobs.
_END_TIMEOUT: Final = 30.0
#: The variables by which a driver finds its JVM, in production too.
_PORT, _SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"


def uses_spark(pipeline: type[Pipeline]) -> bool:
    """Whether a batcher of the pipeline runs on Spark."""
    return any(batcher.engine == "spark" for batcher in pipeline.batchers.values())


# -- the JVM ---------------------------------------------------------------------------------------


@contextmanager
def warm_spark() -> Iterator[None]:
    """While this lasts, a JVM waits for the drivers that this process and its forks start.

    This process itself never connects: its forks could not share a connection.
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
            # What runs in Spark's own processes of Python imports what this one can.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYSPARK_PYTHON": sys.executable,
        },
        text=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        told = keeper.stdout.readline().split()
        if len(told) != 2:
            raise RuntimeError("no JVM for Spark could be started")
        os.environ[_PORT], os.environ[_SECRET] = told
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
    """Take the session of the JVM that is there, as this process's own."""
    from pyspark import SparkConf, SparkContext, java_gateway
    from pyspark.sql import SparkSession

    if _PORT not in os.environ:
        raise RuntimeError("a pipeline with a Spark batcher is struck within warm_spark()")
    pyspark: Any = java_gateway
    gateway = pyspark.launch_gateway()
    jvm = gateway.jvm
    context = jvm.JavaSparkContext.fromSparkContext(jvm.org.apache.spark.SparkContext.getOrCreate())
    SparkContext(gateway=gateway, jsc=context, conf=SparkConf(_jconf=context.getConf()))
    session: Any = SparkSession
    session.stop = lambda session: None  # it is the other drivers' as well


# -- the driver ------------------------------------------------------------------------------------


class Driver:
    """A process that waits until it is told to be the driver of one application.

    It is forked while its parent has one thread yet, and ends if that ends without a word.

    :param lock: A file; who waits for it waits for all drivers.
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
        """In the driver: wait for the application's arguments, and by how much clocks are ahead by
        then; ends this process if none come.
        """
        with os.fdopen(self._read, "rb") as told:
            text = told.read()
        if not text:
            os._exit(0)
        arguments, ahead = json.loads(text)
        return arguments, ahead

    def begin(self, arguments: list[str], ahead: float) -> None:
        """Tell the driver to begin, and what its clock says."""
        os.write(self._write, json.dumps([arguments, ahead]).encode())
        os.close(self._write)

    def end(self, interceptor: Interceptor) -> str:
        """Wait until the driver ends; returns why it did, empty if it has done all.

        While it is asleep this process is as well.
        """
        while True:
            _, status = os.waitpid(self.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            os.kill(os.getpid(), signal.SIGSTOP)
            interceptor.on_wake()
            os.kill(self.pid, signal.SIGCONT)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            _end_jobs(self.pid)
        return f"exit code {code}" if code else ""


def be_driver(arguments: list[str]) -> int:
    """Run the application of :mod:`airflow_broadway.spark.job`; returns its exit code."""
    run_work: Any = application.run_work
    run_work.__kwdefaults__["watch_interval"] = 1e6
    _attach()
    from airflow_broadway.spark import batch  # loads pyspark

    replace(batch, "name_jobs", _tagging)
    return job.main(arguments)


def _tagging(name_jobs: Any) -> Any:
    """Have each job say of which driver it is."""

    def named(session: Any, *given: Any) -> None:
        name_jobs(session, *given)
        session.sparkContext.addJobTag(_tag(os.getpid()))

    return named


def _tag(pid: int) -> str:
    return f"driver-{pid}"


def _end_jobs(pid: int) -> None:
    """End the jobs of a driver that has died; in production they end with its JVM."""
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
    """Wait until every driver has ended; those that do not are killed, and the answer is no."""
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


# -- the task that submits -------------------------------------------------------------------------


class SparkTask:
    """What :class:`operators.spark_submit.BroadwaySparkSubmitOperator` does, without Airflow.

    :param driver: Who runs the application.
    """

    def __init__(
        self,
        run: StagedRun,
        pipeline: Pipeline,
        task: Task,
        ports: Ports,
        driver: Driver,
        interceptor: Interceptor,
    ) -> None:
        self._run = run
        self._pipeline = pipeline
        self._task = task
        self._ports = ports
        self._driver = driver
        self._interceptor = interceptor

    def run(self, planned: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
        """Do it; returns its reference, or ``None`` if there is no batch.

        :param planned: What the batch tasks returned.
        :raises _Incomplete: If batches have no outcome that another try may give them.
        """
        there = [each for each in planned if each]
        batches = SparkBatches(self._run, self._pipeline, there, self._ports)
        ending, error = batches.begin(), ""
        if ending is Ending.OPEN:
            with batches.leases_kept():
                error = self.submit(batches)
            ending = batches.end()
        if ending is Ending.OPEN:
            raise _Incomplete(error)
        # What cannot get an outcome fails the task for good, and the run goes on without it.
        return None if ending is Ending.EMPTY else batches.plans.reference()

    def submit(self, batches: SparkBatches) -> str:
        """Run the application; returns why it ended, empty if it has done all."""
        # Options that are no JSON stand in the class, in the driver too.
        ref = {"class": class_path(type(self._pipeline)), "options": {}}
        info = RunInfo(dag_id=self._run.dag_id, run_id=self._run.run_id)
        made = batches.write_work(self._task.file_name, ref, info)
        return self._run_driver(job.arguments_of(self._run.spark_uri(), *made))

    def _run_driver(self, arguments: list[str]) -> str:
        begin: Callable[[], None] = lambda: self._driver.begin(  # noqa: E731
            arguments, self._interceptor.ahead
        )

        def do() -> str:
            begin()
            return self._driver.end(self._interceptor)

        try:
            # Half of it: the task dies, and its driver goes on.
            return self._interceptor.call("driver", "", do, half=begin, error=_Lost)
        except _Lost:
            return "spark-submit was struck"


class _Lost(Exception):
    """``spark-submit`` could not be started, or was lost."""


class _Incomplete(Exception):
    """Batches have no outcome."""
