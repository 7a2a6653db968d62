"""The threads of one Spark application: batches beside each other, in order where order counts.

Each batcher has a thread that goes through its plans, and ``concurrency`` lanes that run their
batches; the main thread waits, watches and handles signals.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, PipelineError
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.ownership import Ownership, OwnershipLost
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import load_ref
from airflow_broadway.core.stages.batch_order import BatchOrder
from airflow_broadway.core.stages.callbacks import context_of
from airflow_broadway.core.text import many

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_broadway.spark.batch import BatchRunner

__all__ = ["INCOMPLETE", "INTERRUPTED", "REFUSED", "run_work"]

log = logging.getLogger("airflow_broadway.spark")

#: Exit codes; 0 when every batch has an outcome.
INCOMPLETE, REFUSED, INTERRUPTED = 1, 2, 130

#: Seconds between two looks at whether this application is still wanted.
WATCH = 2.0
#: Seconds that batches get to notice that they were cancelled.
GRACE = 20.0
#: Batches of a batcher that get a line each in the log; then a line at most every five seconds.
TOLD = 20


def run_work(
    spark: SparkSession,
    uri: str,
    files: Files,
    work: Work,
    *,
    stop: threading.Event | None = None,
    watch: float = WATCH,
) -> int:
    """Run what a work file asks for in a session that is there; returns the exit code.

    :param stop: Set it to stop taking batches.
    :param watch: Seconds between two looks at the fence.
    """
    pipeline = load_ref(work.pipeline, RunInfo.from_json(work.run))
    plans = [BatchPlan.read(files, path)[0] for path in work.plans]
    for plan in plans:
        if plan.batcher not in pipeline.batchers:
            raise PipelineError(
                f"the plan {plan.path} is for the batcher {plan.batcher!r}, which the pipeline"
                f" {pipeline.name!r} has not (it has {sorted(pipeline.batchers)})"
            )
    run = _Run(spark, uri, files, work, pipeline, plans, stop or threading.Event())
    return run.execute(watch)


class _Run:
    """The threads of one application.

    Each batcher has a thread that goes through its plans, and ``concurrency`` lanes that run their
    batches; the main thread waits, watches and handles signals.
    """

    def __init__(
        self,
        spark: SparkSession,
        uri: str,
        files: Files,
        work: Work,
        pipeline: Pipeline,
        plans: Sequence[BatchPlan],
        stop: threading.Event,
    ) -> None:
        from airflow_broadway.spark.batch import Application
        from airflow_broadway.spark.frame import is_connect

        self.spark, self.files, self.work, self.pipeline = spark, files, work, pipeline
        self.plans = plans
        self.stop = stop
        self.connect = is_connect(spark)
        self.ownership = Ownership(files, work.name, work.try_number)
        self.ownership.check_try(fresh=True)
        self.app = Application(
            spark=spark,
            uri=uri,
            files=files,
            work=work,
            pipeline=pipeline,
            context=context_of(pipeline),
            ownership=self.ownership,
            stopping=stop.is_set,
            application_id="" if self.connect else spark.sparkContext.applicationId,
        )
        self.changed = threading.Condition()
        self.running: set[str] = set()
        self.recorded = self.failed = self.known = 0
        self.without: list[str] = []
        self.problems: dict[str, int] = {}
        self.error: BaseException | None = None

    # -- the main thread -------------------------------------------------------------------------

    def execute(self, watch: float) -> int:
        batchers: dict[str, list[BatchPlan]] = {}
        for plan in self.plans:
            batchers.setdefault(plan.batcher, []).append(plan)
        threads = [
            self._thread(f"batcher-{name}", lambda plans=plans: self._go_through(plans))  # type: ignore[misc]
            for name, plans in batchers.items()
        ]
        with _signals(self.stop), self._watched(watch):
            for thread in threads:
                thread.start()
            # With a timeout, so that signals are handled between two looks.
            while not self.stop.is_set() and any(t.is_alive() for t in threads):
                for thread in threads:
                    thread.join(0.05)
            if self.stop.is_set():
                self._cancel(threads)
        return self._close()

    def _cancel(self, threads: Sequence[threading.Thread]) -> None:
        end = time.monotonic() + GRACE
        while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
            with self.changed:
                running = sorted(self.running)
                self.changed.notify_all()
            for batch_id in running:
                with suppress(Exception):
                    if self.connect:
                        self.spark.interruptTag(batch_id)
                    else:
                        self.spark.sparkContext.cancelJobGroup(batch_id)
            for thread in threads:
                thread.join(0.5)

    def _close(self) -> int:
        left = sum(plan.batches for plan in self.plans) - self.known - self.recorded
        log.info(
            "%s: %d handled now (%d of them failed whole), %d had an outcome before, %d have none.",
            many(sum(plan.batches for plan in self.plans), "batch"),
            self.recorded,
            self.failed,
            self.known,
            left,
        )
        for problem, count in self.problems.items():
            log.error("%s without an outcome: %s", many(count, "batch"), problem)
        if isinstance(self.error, KeyboardInterrupt):
            return INTERRUPTED
        return INCOMPLETE if left or self.error is not None else 0

    def _watched(self, watch: float) -> _Watch:
        parent = os.getppid() if "PYSPARK_GATEWAY_PORT" in os.environ else None

        def look() -> None:
            if parent is not None and os.getppid() != parent:
                # The JVM was killed: nothing can be done or recorded any more.
                log.critical("The JVM of this driver is gone.")
                logging.shutdown()
                os._exit(INCOMPLETE)
            try:
                self.ownership.check_try(fresh=True)
            except OwnershipLost as error:
                self._give_up(error)
            except Exception as error:
                log.debug("Could not look for later tries: %s", error)

        return _Watch(look, watch)

    # -- the threads of a batcher ----------------------------------------------------------------

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except BaseException as error:
                self._give_up(error)

        if self.connect:
            return threading.Thread(target=guarded, name=name, daemon=True)
        from pyspark import InheritableThread

        # Also closes the JVM's half of the thread at its end.
        made: Any = InheritableThread(target=guarded, name=name)
        made.daemon = True
        return made  # type: ignore[no-any-return]

    def _give_up(self, error: BaseException) -> None:
        with self.changed:
            first = self.error is None
            self.error = error if first else self.error
            self.stop.set()
            self.changed.notify_all()
        if first:
            expected = isinstance(error, (BroadwayError, OSError))
            log.error(
                "%s", str(error) or type(error).__name__, exc_info=None if expected else error
            )

    def _go_through(self, plans: Sequence[BatchPlan]) -> None:
        for plan in plans:
            if self.stop.is_set():
                return
            self._run_plan(plan)

    def _run_plan(self, plan: BatchPlan) -> None:
        from airflow_broadway.spark.batch import BatchRunner

        options = self.pipeline.batchers[plan.batcher]
        turns = BatchOrder(self._open(plan), merged=options.merge_keys)
        runner = BatchRunner(self.app, plan)
        count = min(options.concurrency, plan.batches)
        progress = _Progress(plan)
        lanes = [
            self._thread(
                f"{plan.batcher}-{lane}",
                lambda lane=lane: self._work_off(turns, runner, progress, lane),  # type: ignore[misc]
            )
            for lane in range(count)
        ]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()
        runner.finish()

    def _open(self, plan: BatchPlan) -> Iterator[PlannedBatch]:
        """The batches of a plan that have no outcome."""
        done = set(self.files.list(paths.outcomes(plan.path)))
        _, batches = BatchPlan.read(self.files, plan.path)
        for batch in batches:
            if f"{batch.batch_id}.json" in done:
                self.known += 1
            else:
                yield batch

    def _work_off(
        self, turns: BatchOrder, runner: BatchRunner, progress: _Progress, lane: int
    ) -> None:
        while (batch := self._next(turns)) is not None:
            try:
                self._handle(runner, batch, progress, lane)
            finally:
                with self.changed:
                    turns.done(batch)
                    self.running.discard(batch.batch_id)
                    self.changed.notify_all()

    def _next(self, turns: BatchOrder) -> PlannedBatch | None:
        with self.changed:
            while not self.stop.is_set():
                batch = turns.take()
                if batch is not None:
                    self.running.add(batch.batch_id)
                    return batch
                if turns.finished:
                    return None
                self.changed.wait(1.0)
        return None

    def _handle(
        self, runner: BatchRunner, batch: PlannedBatch, progress: _Progress, lane: int
    ) -> None:
        from airflow_broadway.spark.batch import Unreadable

        try:
            outcome = runner.run(batch, lane=lane)
        except OwnershipLost:
            raise
        except (LeaseLapsed, Unreadable) as error:
            # Only these messages are gone, or lost to reading; other batches may have theirs.
            with self.changed:
                self.problems[str(error)] = self.problems.get(str(error), 0) + 1
            return
        with self.changed:
            self.recorded += 1
            self.failed += bool(outcome.error)
        progress.tell(outcome)


class _Progress:
    """Lines of the log about one plan: its first batches, then now and then, every failure."""

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        self._count = 0
        self._told = 0.0
        self._lock = threading.Lock()

    def tell(self, outcome: Any) -> None:
        with self._lock:
            self._count += 1
            now = time.monotonic()
            if self._count > TOLD and now - self._told < 5 and not outcome.failed:
                return
            self._told = now
        log.info(
            "%s %s: %d succeeded, %d failed, %.2f s (batch %d of %d)%s",
            outcome.batcher,
            outcome.batch_id,
            outcome.successful,
            outcome.failed,
            outcome.seconds,
            self._count,
            self._plan.batches,
            f"; {outcome.missing} without an outcome" if outcome.missing else "",
        )


class _Watch:
    """Calls a function now and then from a thread."""

    def __init__(self, look: Callable[[], None], seconds: float) -> None:
        self._look = look
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go, name="watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5)

    def _go(self) -> None:
        while not self._over.wait(self._seconds):
            self._look()


class _signals:  # noqa: N801 - used as a function
    """Lets SIGTERM and SIGINT stop the application in order; does nothing off the main thread."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        log.warning("Received %s: stopping.", signal.Signals(number).name)
        self._stop.set()
