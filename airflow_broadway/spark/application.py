"""The threads of one Spark application: concurrent batches, in order where order matters.

Each batcher has ``concurrency`` lanes: threads that run its batches, one plan after another.  The
main thread waits, handles signals, and watches for a later try.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, zip_longest
from types import FrameType
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, PipelineError
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.deaths import WORK, mark_begun, say_ended, say_started
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.ownership import Ownership, OwnershipLost
from airflow_broadway.core.formats.parts import splits_of, with_parts
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.store_clock import store_clock
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.log_context import log_ids
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.model.sink import CommitInDoubt
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import load_ref
from airflow_broadway.core.stages.batch_order import BatchOrder
from airflow_broadway.core.stages.callbacks import context_of
from airflow_broadway.core.text import pluralize
from airflow_broadway.spark.batch import Application, BatchRunner, Unreadable
from airflow_broadway.spark.session import INCOMPLETE, INTERRUPTED, Sessions, SparkLost

if TYPE_CHECKING:
    from airflow_broadway.spark.arrow import ArrowFiles

log = logging.getLogger("airflow_broadway.spark")

#: Seconds between two checks for a later try.
WATCH_INTERVAL = 2.0
#: The timeout for cancelled batches to end, in seconds.
CANCEL_TIMEOUT = 20.0
#: The first batches of a plan are logged one by one, later ones at an interval in seconds.
LOGGED_BATCHES, LOG_INTERVAL = 20, 5.0


def run_work(
    sessions: Sessions,
    uri: str,
    files: Files,
    work: Work,
    *,
    arrow: ArrowFiles | None = None,
    stop: threading.Event | None = None,
    watch_interval: float = WATCH_INTERVAL,
) -> int:
    """Runs the batches of a work file; returns the exit code.

    :param uri: The run's folder, as a URI for Spark.
    :param files: Access to small files of the same folder.
    :param arrow: Access to its data files where Hadoop has no file system for it.
    :param stop: Set it to stop taking batches.
    :param watch_interval: Seconds between two checks for a later try.
    :raises OwnershipLost: If a later try has begun already.
    :raises PipelineError: If the pipeline has no such batcher, or cannot be loaded.
    """
    run = RunInfo.from_json(work.run)
    with log_ids(dag_id=run.dag_id, run_id=run.run_id):
        pipeline = load_ref(work.pipeline, run)
        plans = [BatchPlan.read(files, path)[0] for path in work.plans]
        for plan in plans:
            if plan.batcher not in pipeline.batchers:
                raise PipelineError(
                    f"the plan {plan.path} is for the batcher {plan.batcher!r}, which the pipeline"
                    f" {pipeline.name!r} does not have (it has {sorted(pipeline.batchers)})"
                )
        Ownership(files, work.name, work.try_number).check_try(fresh=True)
        say_started(files, work.name, work.try_number, WORK)
        clock = _clock(pipeline, uri, files, work)
        stop = stop or threading.Event()
        application = Application(
            sessions=sessions,
            uri=uri,
            files=files,
            work=work,
            pipeline=pipeline,
            context=context_of(pipeline),
            ownership=Ownership(files, work.name, work.try_number, clock=clock),
            arrow=arrow,
            stopping=stop.is_set,
        )
        return _Threads(application, plans, stop).run(watch_interval)


def open_batches(files: Files, work: Work) -> Iterator[str]:
    """Yields the ids of the batches that an earlier try may have in hand, of all plans in turn:
    those without an outcome, and those that were split since.
    """
    for batch_ids in zip_longest(*(_open_batches(files, path) for path in work.plans)):
        yield from filter(None, batch_ids)


def _open_batches(files: Files, path: str) -> Iterator[str]:
    done = set(files.list(paths.outcomes(path)))
    splits = splits_of(files, path, done)
    yield from splits
    for batch in with_parts(BatchPlan.read(files, path)[1], splits):
        if f"{batch.batch_id}.json" not in done:
            yield batch.batch_id


def _clock(pipeline: Pipeline, uri: str, files: Files, work: Work) -> Clock:
    """Returns the clock for the driver's lease checks."""
    clock, producer = SystemClock(), pipeline.producer
    if producer.local_clock:
        return clock
    path = paths.of_try(work.name, work.try_number, WORK, "clock")
    return store_clock(
        files, path, lambda: files.replace(path, "{}"), float(producer.lease), clock, place=uri
    )


class _Threads:
    """The threads of one application; shared state is changed under ``_changed``."""

    def __init__(
        self, application: Application, plans: Sequence[BatchPlan], stop: threading.Event
    ) -> None:
        self._app = app = application
        self._plans = plans
        self._stop = stop
        self._parent = os.getppid()
        self._changed = threading.Condition()
        self._running: set[str] = set()
        #: Counts of batches: recorded now, failed whole among them, and recorded before.
        self._recorded = self._failed = self._known = 0
        only = app.work.only
        #: The number of batches to handle; grows when splits are found.
        self._total = sum(plan.batches for plan in plans) if only is None else len(only)
        #: Reason → number of batches without an outcome.
        self._problems: Counter[str] = Counter()
        self._error: BaseException | None = None

    # -- the main thread -------------------------------------------------------------------------

    def run(self, watch_interval: float) -> int:
        """Runs all batches; returns the exit code."""
        batchers: dict[str, list[_PlanRun]] = {}
        for plan in self._plans:
            run = _PlanRun(self._app, plan, self._open_batches(plan))
            batchers.setdefault(plan.batcher, []).append(run)
        threads = [
            self._thread(f"{name}-{lane}", partial(self._run_lane, runs, lane))
            for name, runs in batchers.items()
            for lane in range(min(self._concurrency(name), self._total))
        ]
        with _stopped_by_signals(self._stop):
            for thread in threads:
                thread.start()
            check_at = time.monotonic() + watch_interval
            # With a timeout, so that signals are handled.
            while not self._stop.is_set() and any(t.is_alive() for t in threads):
                for thread in threads:
                    thread.join(0.05)
                if time.monotonic() >= check_at:
                    self._check()
                    check_at = time.monotonic() + watch_interval
            if self._stop.is_set():
                self._cancel(threads)
        for run in chain.from_iterable(batchers.values()):
            run.runner.recorder.finish()
        return self._close()

    def _concurrency(self, batcher: str) -> int:
        # Sequentially, a crash identifies its batch.
        return 1 if self._app.work.alone else self._app.pipeline.batchers[batcher].concurrency

    def _cancel(self, threads: Sequence[threading.Thread]) -> None:
        end = time.monotonic() + CANCEL_TIMEOUT
        while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
            with self._changed:
                running = sorted(self._running)
                self._changed.notify_all()
            for batch_id in running:
                self._app.sessions.cancel(batch_id)
            for thread in threads:
                thread.join(0.5)

    def _close(self) -> int:
        self._record_end()
        total = self._total
        left = total - self._known - self._recorded
        log.info(
            "%s: %d handled now (%d of them failed whole), %d had an outcome before, %d have none.",
            pluralize(total, "batch"),
            self._recorded,
            self._failed,
            self._known,
            left,
        )
        for problem, count in self._problems.items():
            log.error("%s without an outcome: %s", pluralize(count, "batch"), problem)
        if isinstance(self._error, KeyboardInterrupt):
            return INTERRUPTED
        return INCOMPLETE if left or self._error is not None else 0

    def _record_end(self) -> None:
        """Records the regular end, unless a batch killed the application: by a callback that exits
        or takes down the JVM.  Storage errors and stop requests are no crashes.
        """
        error = self._error
        if isinstance(error, SparkLost) or not isinstance(
            error, (BroadwayError, OSError, KeyboardInterrupt, type(None))
        ):
            return
        work = self._app.work
        try:
            say_ended(self._app.files, work.name, work.try_number, WORK)
        except Exception as failed:  # it then counts as one crash, which is harmless
            log.warning("Could not write down that this application ended: %s", failed)

    def _check(self) -> None:
        """Checks that the JVM is alive and no later try has begun; called periodically."""
        if "PYSPARK_GATEWAY_PORT" in os.environ and os.getppid() != self._parent:
            # The JVM was killed: nothing can be recorded any more.
            log.critical("The JVM of this driver has ended.")
            logging.shutdown()
            os._exit(INCOMPLETE)
        try:
            self._app.ownership.check_try(fresh=True)
        except OwnershipLost as error:
            self._abort(error)
        except Exception as error:
            log.debug("Could not look for later tries: %s", error)

    # -- the lanes of a batcher ------------------------------------------------------------------

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except BaseException as error:
                self._abort(error)

        return self._app.sessions.make_thread(name, guarded)

    def _abort(self, error: BaseException) -> None:
        """Stops the application on an error; logs the first, which determines the exit code."""
        with self._changed:
            first = self._error is None
            self._error = error if first else self._error
            self._stop.set()
            self._changed.notify_all()
        if first:
            expected = isinstance(error, (BroadwayError, OSError))
            log.error(
                "%s", str(error) or type(error).__name__, exc_info=None if expected else error
            )

    def _open_batches(self, plan: BatchPlan) -> Iterator[PlannedBatch]:
        """Yields the batches of a plan that have no outcome."""
        files, only = self._app.files, self._app.work.only
        done = set(files.list(paths.outcomes(plan.path)))
        splits = splits_of(files, plan.path, done)
        _, batches = BatchPlan.read(files, plan.path)
        pending = with_parts(batches, splits)
        if only is None:
            self._total += sum(len(parts) - 1 for parts in splits.values())
        else:
            place = {batch_id: number for number, batch_id in enumerate(only)}
            selected = [batch for batch in pending if batch.batch_id in place]
            pending = iter(sorted(selected, key=lambda batch: place[batch.batch_id]))
        for batch in pending:
            if f"{batch.batch_id}.json" in done:
                self._known += 1
            else:
                yield batch

    def _run_lane(self, runs: Sequence[_PlanRun], lane: int) -> None:
        """Runs batches of one plan after another."""
        for run in runs:
            while (batch := self._next(run.order)) is not None:
                try:
                    with log_ids(batcher=run.runner.plan.batcher, batch_id=batch.batch_id):
                        try:
                            self._run_batch(run, batch, lane)
                        except BaseException as error:
                            self._abort(error)  # here, where the log line has the batch's id
                            raise
                finally:
                    with self._changed:
                        run.order.done(batch)
                        self._running.discard(batch.batch_id)
                        self._changed.notify_all()

    def _next(self, order: BatchOrder) -> PlannedBatch | None:
        """Waits for a batch that may run; returns ``None`` when the plan is done."""
        with self._changed:
            while not self._stop.is_set():
                batch = order.take()
                if batch is not None:
                    self._running.add(batch.batch_id)
                    return batch
                if order.finished:
                    return None
                self._changed.wait(1.0)
        return None

    def _run_batch(self, run: _PlanRun, batch: PlannedBatch, lane: int) -> None:
        app = self._app
        if app.work.marked:
            mark_begun(app.files, app.work.name, app.work.try_number, WORK, batch.batch_id)
        try:
            outcome = run.runner.run(batch, lane=lane)
        except OwnershipLost:
            raise
        except (LeaseLapsed, CommitInDoubt, Unreadable) as error:
            # Only this batch's messages are lost or unreadable; other batches continue.
            with self._changed:
                self._problems[str(error)] += 1
            return
        with self._changed:
            self._recorded += 1
            self._failed += bool(outcome.error)
            run.log(outcome)


class _PlanRun:
    """The run of one plan: its batches in a valid order, and its progress in the log."""

    def __init__(
        self, app: Application, plan: BatchPlan, open_batches: Iterator[PlannedBatch]
    ) -> None:
        options = app.pipeline.batchers[plan.batcher]
        self.runner = BatchRunner(app, plan)
        self.order = BatchOrder(open_batches, merged=options.merge_keys)
        self._count = 0
        self._logged_at = 0.0

    def log(self, outcome: Outcome) -> None:
        """Logs an outcome: of the first batches, then periodically, and every failure.

        Called by one thread at a time.
        """
        self._count += 1
        now = time.monotonic()
        recent = now - self._logged_at < LOG_INTERVAL
        if self._count > LOGGED_BATCHES and recent and not outcome.failed:
            return
        self._logged_at = now
        log.info(
            "%s %s: %d succeeded, %d failed, %.2f s (batch %d of %d)%s",
            outcome.batcher,
            outcome.batch_id,
            outcome.successful,
            outcome.failed,
            outcome.seconds,
            self._count,
            self.runner.plan.batches,
            f"; {outcome.missing} without an outcome" if outcome.missing else "",
        )


@contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Stops the application gracefully on SIGTERM and SIGINT; inactive off the main thread."""
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        log.warning("Received %s: stopping.", signal.Signals(number).name)
        stop.set()

    if threading.current_thread() is threading.main_thread():
        before = {
            number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)
        }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
