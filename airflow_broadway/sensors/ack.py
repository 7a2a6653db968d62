"""Settles every message of a run at its broker by its recorded outcome."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from airflow.exceptions import AirflowRescheduleException
from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowSensorTimeout,
    BaseSensorOperator,
    PokeReturnValue,
    conf,
)
from airflow.sdk import timezone

from airflow_broadway.adapters import task_docs
from airflow_broadway.adapters.host import Host
from airflow_broadway.adapters.lineage import LineageMixin, report_execution
from airflow_broadway.adapters.links import AT_BROKER, note_console
from airflow_broadway.adapters.parsing import declared, pipeline_ref
from airflow_broadway.core.custody.run_summary import (
    check_fail_when,
    lines_of,
    summary_line,
    unbalanced_line,
)
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.rules import SECONDS, SECONDS_OR_ZERO
from airflow_broadway.core.model.run_source import RunSource
from airflow_broadway.triggers.ack import FINISHED, BroadwayAckTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_broadway.staging.run_folder import StagedRun

__all__ = ["BroadwayAckSensor"]

#: The default of the longest interval between two checks, in seconds.
MAX_POKE_INTERVAL: Final = 15.0
#: The same in the triggerer, which notices finished tasks by itself.
MAX_DEFERRED_INTERVAL: Final = 300.0

#: In reschedule mode it keeps its worker for this many seconds from the start of a run, unless no
#: watched task has been running for ``QUIET_TIMEOUT``.
STAY_TIMEOUT: Final = 60.0
QUIET_TIMEOUT: Final = 5.0
#: Seconds between two checks of task states meanwhile: at least, after a change, and at most.
MIN_STAY_INTERVAL: Final = 0.3
STAY_INTERVAL: Final = 1.0

#: The minimum seconds until a rescheduled check, unless ``poke_interval`` is shorter.  The
#: supervisor of a task may outlive it by ``[workers] min_heartbeat_interval``, which is 5.
MIN_RESCHEDULE_INTERVAL: Final = 10.0

#: States of a watched task that make the run fail.
FAILED: Final = frozenset({"failed", "upstream_failed"})


class BroadwayAckSensor(LineageMixin, BaseSensorOperator):
    """Watches the tasks of a run, renews its leases, settles each message by its recorded outcome.

    It starts with the run (``trigger_rule="always"``) and is the last to end: when every watched
    task has finished it settles messages with an outcome, releases the others, and checks that each
    message received is accounted for exactly once.  Then it fails the run if any watched task
    failed, the sum does not balance, messages had lapsed or could not be settled, or too many
    failed by ``fail_when``.  A failed sensor needs attention; settling was not skipped.

    Its error, and the ``summary`` that it returns, contain counts and no text of a message or a
    broker, so that notifiers can send them.

    :param pipeline: As for :class:`BroadwayProcessorOperator`. (templated)
    :param watch: Ids of the process, batch and Spark tasks.
    :param hold_failed: Seconds for which leases are kept after a batch or Spark task has finally
        failed, so that it can be fixed and cleared.
    :param fail_when: The failed messages that fail the run, once all are settled: ``"all"``
        (default), if every handled message failed; an integer, at that number; a share below 1,
        such as ``0.05``, at that share of the handled ones; ``"never"``.  ``"all"`` and a share of
        fewer than 10 messages need one failure that is not retried.
    :param staging: URI of the staging root; by default ``[broadway] staging``. (templated)
    :param poke_interval: The longest time between two checks, in seconds; by default a quarter of
        the lease, at most 15, or 300 if deferrable: the triggerer notices finished tasks by itself.
        A young run is checked more often.  With ``"reschedule"``, less than 10 is unreliable:
        Airflow may treat a sensor as killed that is rescheduled before the supervisor of its last
        check has ended.
    :param mode: ``"reschedule"`` (default) frees the worker between two checks, once the run is a
        minute old or none of its tasks is running; ``"poke"`` never does, except in ``dag.test()``,
        which runs one task at a time.
    :param deferrable: Wait in the triggerer; by default ``[operators] default_deferrable``.
    """

    template_fields: Sequence[str] = ("pipeline", "staging")
    template_fields_renderers = {"pipeline": "json"}  # noqa: RUF012 - as in BaseOperator
    ui_color = "#fef7e0"
    operator_extra_links = AT_BROKER

    def __init__(
        self,
        *,
        pipeline: Any,
        watch: Sequence[str],
        hold_failed: float = 0.0,
        fail_when: str | float = "all",
        staging: str | None = None,
        poke_interval: timedelta | float | None = None,
        deferrable: bool | None = None,
        **kwargs: Any,
    ) -> None:
        ref = pipeline_ref(pipeline, "ack")
        known = declared(ref)
        if deferrable is None:
            deferrable = conf.getboolean("operators", "default_deferrable", fallback=False)
        self.deferrable = deferrable
        most = MAX_DEFERRED_INTERVAL if deferrable else MAX_POKE_INTERVAL
        lease = None if known is None else known.producer.lease
        interval = _poke_interval(poke_interval, lease, most)
        kwargs.setdefault("mode", "reschedule")
        kwargs.setdefault("trigger_rule", "always")
        # Before its siblings: it renews their leases.
        kwargs.setdefault("priority_weight", 100)
        kwargs.setdefault("doc_md", task_docs.ACK)
        super().__init__(poke_interval=interval, **kwargs)
        self.pipeline = ref
        if isinstance(watch, str) or not watch:
            raise OptionsError(f"{self.task_id}.watch", "a list of task ids", watch)
        self.watch = list(watch)
        if not SECONDS_OR_ZERO.holds(hold_failed):
            raise OptionsError(f"{self.task_id}.hold_failed", SECONDS_OR_ZERO.text, hold_failed)
        self.hold_failed = hold_failed
        self.fail_when = check_fail_when(f"{self.task_id}.fail_when", fail_when)
        self.staging = staging

    # -- waiting -------------------------------------------------------------------------------

    def execute(self, context: Context) -> Any:
        if _runs_inline():
            self.mode = "reschedule"  # else it would wait for tasks that only run after it
        if not self.deferrable or _runs_inline():
            return super().execute(context)
        return self._check_or_defer(context)

    def resume(self, context: Context, event: Any = None) -> Any:
        """Continues after the trigger fired."""
        self._resumed = True
        return self._check_or_defer(context)

    def _check_or_defer(self, context: Context) -> Any:
        summary = self._check_run(context)
        if summary is not None:
            return summary
        states = self._states(context)
        left = self.timeout - self._elapsed(context)
        if left <= 0:
            raise AirflowSensorTimeout(
                f"The run was not over after {self.timeout:g} s; messages without an outcome were"
                " released"
            )
        return self.defer(
            trigger=BroadwayAckTrigger(
                dag_id=context["ti"].dag_id,
                run_id=context["ti"].run_id,
                watch=self.watched(context),
                finished=sum(state in FINISHED for state in states.values()),
                poke_interval=max(min(self.poke_interval, left), 1.0),
            ),
            method_name="resume",
        )

    def poke(self, context: Context) -> bool | PokeReturnValue:
        summary = self._check_run(context)
        while summary is None and self.mode == "reschedule" and self._stay(context):
            summary = self._check_run(context)
        if summary is not None:
            return PokeReturnValue(is_done=True, xcom_value=summary)
        elapsed = self._elapsed(context)
        if self.mode == "reschedule" and elapsed < self.timeout:
            # In dag.test() no other task runs concurrently.
            least = 1.0 if _runs_inline() else MIN_RESCHEDULE_INTERVAL
            wait = min(max(least, elapsed / 4), self.poke_interval)
            again = timezone.utcnow() + timedelta(seconds=wait)
            raise AirflowRescheduleException(again)  # type: ignore[no-untyped-call]
        return False

    def _stay(self, context: Context) -> bool:
        """Waits at this worker while the run is young and its tasks are running.

        A short run then ends within a second of its last task, a run of short tasks sooner, and no
        process is started for each check.  If the sensor were rescheduled as often, Airflow would
        occasionally treat it as killed: it distinguishes two checks of one try only after the end
        of the first.

        :returns: Whether to check again here; else the sensor is rescheduled.
        """
        if _runs_inline() or self._elapsed(context) >= STAY_TIMEOUT or _over(self._states(context)):
            return False
        started = busy = changed = time.monotonic()
        last: dict[str, str | None] = {}
        while time.monotonic() - started < self.poke_interval:
            quiet = time.monotonic() - changed
            time.sleep(min(STAY_INTERVAL, max(MIN_STAY_INTERVAL, quiet / 3)))
            states = self._states(context)
            if states != last:
                last, changed = states, time.monotonic()
            if _over(states):
                return True
            if "running" in states.values():
                busy = time.monotonic()
            # While none runs, one may be waiting for the slot that this task occupies.
            elif time.monotonic() - busy > QUIET_TIMEOUT:
                return False
        return True

    def _elapsed(self, context: Context) -> float:
        first = context["ti"].get_first_reschedule_date(context) or context["ti"].start_date
        return 0.0 if first is None else (timezone.utcnow() - first).total_seconds()

    #: The run's folder, once it is open.
    _run: StagedRun | None = None
    _resumed = False

    def _is_first(self, context: Context) -> bool:
        """Returns whether this is the first check: the task was not rescheduled or deferred."""
        return not self._resumed and context["ti"].get_first_reschedule_date(context) is None

    # -- checking ------------------------------------------------------------------------------

    def _check_run(self, context: Context) -> dict[str, Any] | None:
        """Checks the run once; returns its summary when it is over.

        :raises AirflowException: If it is over, and a watched task failed, the sum does not
            balance, or messages of a process task are not in this staging folder.
        """
        from airflow_broadway.runs.watch import RunWatcher

        host = Host(context)
        pipeline = host.load_pipeline(self.pipeline)
        note_console(self, pipeline, host.ports)
        run = self._run = self._run or host.open_run(
            self.staging, pipeline, report=self._is_first(context)
        )
        late = self._describe_delay(context, float(pipeline.producer.lease))
        if late and self._is_first(context):
            self.log.warning("%s", late)
        watcher = RunWatcher(run, pipeline, task_ids=self.watched(context), ports=host.ports)
        states = self._states(context)
        finished = _over(states)
        failed = sorted(task for task, state in states.items() if state in FAILED)
        last = self._elapsed(context) + self.poke_interval > self.timeout
        try:
            report = watcher.look(
                over=finished,
                failed=failed,
                processed=self._processed(context) if finished else (),
                last=last,
                hold_failed=self.hold_failed,
                again=self.poke_interval if self.deferrable else 0.0,
            )
        finally:
            watcher.close()
        if report is None:
            return None
        report_execution(
            self,
            pipeline,
            host.ports.connections,
            {**report["totals"], "batchers": report["batchers"]},
            lambda: RunSource.from_json(report.get("source") or {}),
        )
        return self._conclude(report, late)

    def _describe_delay(self, context: Context, lease: float) -> str:
        """Returns a sentence if it was more than a quarter of the lease until the first check."""
        ti, run_start = context["ti"], context["dag_run"].start_date
        if ti.try_number > 1 or run_start is None:  # cleared, perhaps long after the run
            return ""
        start = ti.get_first_reschedule_date(context) or ti.start_date
        delay = 0.0 if start is None else (start - run_start).total_seconds()
        if delay <= lease / 4:
            return ""
        return (
            f"{self.task_id} waited {delay:.0f} s for a slot (pool {self.pool!r}) and renewed no"
            " lease meanwhile: give it a pool of its own, or deferrable=True"
        )

    def _conclude(self, report: dict[str, Any], late: str = "") -> dict[str, Any]:
        """Logs the report, and returns its summary.

        :param late: See :meth:`_describe_delay`.
        """
        from airflow_broadway.runs.account import trouble_of

        totals = report["totals"]
        for line in lines_of(report):
            self.log.info("%s", line)
        self.log.info(
            "Full report: airflow-broadway show --dag-id %s --run-id %s (%s)",
            report["dag_id"],
            report["run_id"],
            report["path"],
        )
        if report.get("unseen"):
            # A retry may run on a host that has them.
            raise AirflowException(report["unseen"])
        # Checking again would have the same result: no retry.
        if not report["balanced"]:
            raise AirflowFailException(f"{unbalanced_line(totals)}.  See {report['path']}")
        troubles = trouble_of(report, self.fail_when)
        if totals["lapsed"] and late:
            troubles.append(late)
        summary = summary_line(totals)
        if troubles:
            raise AirflowFailException(
                f"All messages are settled or released, but {'.  '.join(troubles)}.  {summary}"
            )
        return {"report": report["path"], "summary": summary, **totals}

    def _states(self, context: Context) -> dict[str, str | None]:
        """Returns the states of the watched task instances: ``process``, or ``process[0]`` etc."""
        ti = context["ti"]
        watched = self.watched(context)
        states = ti.get_task_states(dag_id=ti.dag_id, run_ids=[ti.run_id], task_ids=watched)
        own = states.get(ti.run_id, {})
        return {_instance_label(name, watched): state for name, state in own.items()}

    def _processed(self, context: Context) -> list[Mapping[str, Any]]:
        """Returns the references of the watched process tasks."""
        pulled = context["ti"].xcom_pull(task_ids=self.watched(context))
        return [ref for ref in pulled if isinstance(ref, Mapping) and ref.get("generation")]

    def watched(self, context: Context) -> list[str]:
        """Returns the watched ids as in the Dag: those of a task group have its prefix."""
        known = set(context["dag"].task_ids)
        group = self.task_group
        prefix = f"{group.group_id}." if group is not None and group.group_id else ""
        watched = []
        for task_id in self.watch:
            full = task_id if task_id in known else f"{prefix}{task_id}"
            if full not in known:
                raise AirflowException(
                    f"{self.task_id} watches {task_id!r}, and the Dag has no such task; it has"
                    f" {sorted(known)}"
                )
            watched.append(full)
        return watched


def _over(states: Mapping[str, str | None]) -> bool:
    """Returns whether all watched tasks have finished."""
    return bool(states) and all(state in FINISHED for state in states.values())


def _poke_interval(
    interval: timedelta | float | None, lease: float | str | None, most: float
) -> float:
    """Returns the poke interval, bounded by the lease that it renews.

    :param most: The longest default.
    """
    if isinstance(lease, str):  # a template that is not rendered yet
        lease = None
    if interval is None:
        return min(most, (lease or MAX_POKE_INTERVAL * 4) / 4)
    seconds = interval.total_seconds() if isinstance(interval, timedelta) else interval
    if not SECONDS.holds(seconds):
        raise OptionsError("ack.poke_interval", SECONDS.text, interval)
    if lease is not None and seconds > lease / 2:
        raise OptionsError(
            "ack.poke_interval",
            f"at most half of the producer's lease ({lease:g} s), which it renews",
            interval,
        )
    return float(seconds)


def _runs_inline() -> bool:
    """Returns whether this is ``dag.test()``, which runs a trigger before another task."""
    from airflow.sdk.execution_time import task_runner

    comms = getattr(task_runner, "SUPERVISOR_COMMS", None)
    return type(comms).__name__ == "InProcessSupervisorComms"


def _instance_label(name: str, watched: Sequence[str]) -> str:
    """Converts ``process_0``, Airflow's name of an instance here, to its UI's ``process[0]``."""
    task_id, _, index = name.rpartition("_")
    return f"{task_id}[{index}]" if task_id in watched and name not in watched else name
