"""Settle every message at its broker by what became of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    AirflowSensorTimeout,
    BaseSensorOperator,
    PokeReturnValue,
    conf,
)
from airflow.sdk import timezone
from airflow.sdk.exceptions import AirflowRescheduleException

from airflow_broadway.adapters import task_docs
from airflow_broadway.adapters.host import Host
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
from airflow_broadway.triggers.ack import FINISHED, BroadwayAckTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_broadway.staging.run_folder import StagedRun

__all__ = ["BroadwayAckSensor"]

#: The longest interval between two looks, in seconds, unless another is given.
MAX_POKE_INTERVAL: Final = 15.0

#: In reschedule mode it stays at its worker for so many seconds from the start of a run, unless no
#: watched task has been running for ``QUIET_TIMEOUT``.
STAY_TIMEOUT: Final = 60.0
QUIET_TIMEOUT: Final = 5.0
#: Seconds between two looks at the states of tasks meanwhile.
STAY_INTERVAL: Final = 1.0

#: The least seconds for which it is rescheduled, unless its ``poke_interval`` is shorter.  The
#: supervisor of a task may outlive it by ``[workers] min_heartbeat_interval``, which is 5.
MIN_RESCHEDULE_INTERVAL: Final = 10.0

#: States of a watched task that make the run fail.
FAILED: Final = frozenset({"failed", "upstream_failed"})


class BroadwayAckSensor(BaseSensorOperator):
    """Watch the tasks of a run, renew its leases, settle each message by its recorded outcome.

    It starts with the run (``trigger_rule="always"``) and is the last to end: when every watched
    task has finished it settles what has an outcome, releases what has none, checks that each
    message received is accounted for exactly once, and then fails the run if any watched task
    failed, the sum does not balance, messages had lapsed or could not be settled, or so many failed
    as ``fail_when`` says.  Red means look, never that settling was skipped.

    Its failure, and the ``summary`` that it returns, have figures and no text of a message or of a
    broker, so that notifiers can send them.

    :param pipeline: As for :class:`BroadwayProcessorOperator`. (templated)
    :param watch: Ids of the process, batch and Spark tasks.
    :param hold_failed: Seconds for which leases are kept after a batch or Spark task failed for
        good, so that it can be mended and cleared.
    :param fail_when: When failed messages make the run fail, once all are settled: ``"all"``
        (default), if every message that was handled failed; an integer, from so many on; a share
        below 1, such as ``0.05``, from that share of them on; ``"never"``.  ``"all"`` and a share
        of fewer than 10 messages need one failure that is not retried.
    :param staging: URI of the staging root; ``[broadway] staging`` unless given. (templated)
    :param poke_interval: The longest time between two looks, in seconds; a quarter of the lease,
        at most 15, unless given.  A young run is looked at more often.  With ``"reschedule"``, less
        than 10 is at the mercy of Airflow, which now and then takes a sensor that comes back
        before the supervisor of its last look has ended for killed.
    :param mode: ``"reschedule"`` (default) frees the worker between two looks, once the run is a
        minute old or none of its tasks is running; ``"poke"`` never does, except in ``dag.test()``,
        which runs one task at a time.
    :param deferrable: Wait in the triggerer; ``[operators] default_deferrable`` unless given.
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
        interval = _interval(poke_interval, None if known is None else known.producer.lease)
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
        if deferrable is None:
            deferrable = conf.getboolean("operators", "default_deferrable", fallback=False)
        self.deferrable = deferrable

    # -- waiting -------------------------------------------------------------------------------

    def execute(self, context: Context) -> Any:
        if _runs_inline():
            self.mode = "reschedule"  # else it would wait for what only runs after it
        if not self.deferrable or _runs_inline():
            return super().execute(context)
        return self._look_or_defer(context)

    def resume(self, context: Context, event: Any = None) -> Any:
        """Go on after the trigger fired."""
        self._resumed = True
        return self._look_or_defer(context)

    def _look_or_defer(self, context: Context) -> Any:
        done = self._look(context)
        if done is not None:
            return done
        states = self._states(context)
        left = self.timeout - self._elapsed(context)
        if left <= 0:
            raise AirflowSensorTimeout(
                f"The run was not over after {self.timeout:g} s; what had no outcome was given back"
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
        done = self._look(context)
        while done is None and self.mode == "reschedule" and self._stay(context):
            done = self._look(context)
        if done is not None:
            return PokeReturnValue(is_done=True, xcom_value=done)
        elapsed = self._elapsed(context)
        if self.mode == "reschedule" and elapsed < self.timeout:
            # In dag.test() nothing else runs beside it.
            least = 1.0 if _runs_inline() else MIN_RESCHEDULE_INTERVAL
            wait = min(max(least, elapsed / 4), self.poke_interval)
            again = timezone.utcnow() + timedelta(seconds=wait)
            raise AirflowRescheduleException(again)  # type: ignore[no-untyped-call]
        return False

    def _stay(self, context: Context) -> bool:
        """Wait at this worker while the run is young and its tasks are at work.

        A short run then ends within a second of its last task, and nothing is started for each
        look.  Were the sensor rescheduled as often, Airflow would now and then take it for killed:
        it knows two looks of one try apart only once it has seen the end of the first.

        :returns: Whether to look again here; else the sensor is rescheduled.
        """
        if _runs_inline() or self._elapsed(context) >= STAY_TIMEOUT or _over(self._states(context)):
            return False
        started = busy = time.monotonic()
        while time.monotonic() - started < self.poke_interval:
            time.sleep(STAY_INTERVAL)
            states = self._states(context)
            if _over(states):
                return True
            if "running" in states.values():
                busy = time.monotonic()
            # While none runs, one may be waiting for the slot that this task holds.
            elif time.monotonic() - busy > QUIET_TIMEOUT:
                return False
        return True

    def _elapsed(self, context: Context) -> float:
        first = context["ti"].get_first_reschedule_date(context) or context["ti"].start_date
        return 0.0 if first is None else (timezone.utcnow() - first).total_seconds()

    #: The folder of the run, once it is open.
    _run: StagedRun | None = None
    _resumed = False

    def _is_first(self, context: Context) -> bool:
        """Whether this task looks for the first time: it was not rescheduled or deferred."""
        return not self._resumed and context["ti"].get_first_reschedule_date(context) is None

    # -- looking -------------------------------------------------------------------------------

    def _look(self, context: Context) -> dict[str, Any] | None:
        """Look once; return the run's summary when all is done.

        :raises AirflowException: When all is done, and a watched task failed, the sum is off, or
            messages of a process task are not in this staging folder.
        """
        from airflow_broadway.runs.watch import RunWatcher

        host = Host(context)
        pipeline = host.load_pipeline(self.pipeline)
        note_console(self, pipeline, host.ports)
        run = self._run = self._run or host.open_run(
            self.staging, pipeline, report=self._is_first(context)
        )
        settler = RunWatcher(run, pipeline, task_ids=self.watched(context), ports=host.ports)
        states = self._states(context)
        finished = _over(states)
        failed = sorted(task for task, state in states.items() if state in FAILED)
        last = self._elapsed(context) + self.poke_interval > self.timeout
        try:
            report = settler.look(
                over=finished,
                failed=failed,
                processed=self._processed(context) if finished else (),
                last=last,
                hold_failed=self.hold_failed,
            )
        finally:
            settler.close()
        return None if report is None else self._conclude(report)

    def _conclude(self, report: dict[str, Any]) -> dict[str, Any]:
        from airflow_broadway.runs.account import trouble_of

        totals = report["totals"]
        for line in lines_of(report):
            self.log.info("%s", line)
        self.log.info(
            "All of it: airflow-broadway show --dag-id %s --run-id %s (%s)",
            report["dag_id"],
            report["run_id"],
            report["path"],
        )
        if report.get("unseen"):
            # A retry may run on the host that sees them.
            raise AirflowException(report["unseen"])
        # Looking again would find the same: no retry.
        if not report["balanced"]:
            raise AirflowFailException(f"{unbalanced_line(totals)}.  See {report['path']}")
        troubles = trouble_of(report, self.fail_when)
        summary = summary_line(totals)
        if troubles:
            raise AirflowFailException(
                f"All messages are settled or given back, but {'.  '.join(troubles)}.  {summary}"
            )
        return {"report": report["path"], "summary": summary, **totals}

    def _states(self, context: Context) -> dict[str, str | None]:
        """The states of the watched task instances: ``process``, or ``process[0]`` and so on."""
        ti = context["ti"]
        watched = self.watched(context)
        found = ti.get_task_states(dag_id=ti.dag_id, run_ids=[ti.run_id], task_ids=watched)
        return {_shown(name, watched): state for name, state in found.get(ti.run_id, {}).items()}

    def _processed(self, context: Context) -> list[Mapping[str, Any]]:
        """The references of the watched process tasks."""
        pulled = context["ti"].xcom_pull(task_ids=self.watched(context))
        return [each for each in pulled if isinstance(each, Mapping) and each.get("generation")]

    def watched(self, context: Context) -> list[str]:
        """The watched ids as Airflow knows them: those of a task group carry its prefix."""
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
    """Whether all watched tasks are through."""
    return bool(states) and all(state in FINISHED for state in states.values())


def _interval(given: timedelta | float | None, lease: float | str | None) -> float:
    """The poke interval, bounded by the lease that it renews."""
    if isinstance(lease, str):  # a template, whose value nobody knows yet
        lease = None
    if given is None:
        return min(MAX_POKE_INTERVAL, (lease or MAX_POKE_INTERVAL * 4) / 4)
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if not SECONDS.holds(seconds):
        raise OptionsError("ack.poke_interval", SECONDS.text, given)
    if lease is not None and seconds > lease / 2:
        raise OptionsError(
            "ack.poke_interval",
            f"at most half of the producer's lease ({lease:g} s), which it renews",
            given,
        )
    return float(seconds)


def _runs_inline() -> bool:
    """Whether this is ``dag.test()``, which waits for a trigger before it runs another task."""
    from airflow.sdk.execution_time import task_runner

    comms = getattr(task_runner, "SUPERVISOR_COMMS", None)
    return type(comms).__name__ == "InProcessSupervisorComms"


def _shown(name: str, watched: Sequence[str]) -> str:
    """``process_0``, as Airflow names an instance here, in the words of its UI: ``process[0]``."""
    task_id, _, index = name.rpartition("_")
    return f"{task_id}[{index}]" if task_id in watched and name not in watched else name
