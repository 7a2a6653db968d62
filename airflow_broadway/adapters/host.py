"""Reads an Airflow task's context: the task, its run, and what Airflow gives to both."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from airflow.providers.common.compat.sdk import AirflowTaskTimeout, conf

from airflow_broadway.adapters.child_process import CHILD_HOST
from airflow_broadway.adapters.connections import AirflowConnections
from airflow_broadway.adapters.metrics import AirflowMetrics
from airflow_broadway.adapters.staging import open_store
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.errors import RequestRefused
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import load_ref
from airflow_broadway.runs.ports import Ports, Task
from airflow_broadway.runs.sources.choice import PARAMS, SourceRequest

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_broadway.staging.run_folder import StagedRun

#: Seconds that a task which is told to stop takes at most to finish what it is at.  Airflow kills
#: it after five, and what is done must be stored by then.
MAX_SHUTDOWN: Final = 2.0


class Host:
    """What Airflow gives a task, read from the task's context.

    :param context: As ``execute`` of an operator gets it.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.ti: Any = context["ti"]
        self.params: Mapping[str, Any] = context["params"]

    @cached_property
    def task(self) -> Task:
        """The task instance."""
        index = getattr(self.ti, "map_index", None)
        return Task(
            dag_id=self.ti.dag_id,
            run_id=self.ti.run_id,
            task_id=self.ti.task_id,
            map_index=-1 if index is None else index,
            try_number=self.ti.try_number,
            # Airflow raises it by the tries that a clear grants.
            cleared=getattr(self.ti, "max_tries", None) or 0,
            forks=_is_supervised(),
        )

    @cached_property
    def ports(self) -> Ports:
        """What ``runs`` may use of Airflow."""
        return Ports(
            connections=AirflowConnections(),
            metrics=AirflowMetrics(),
            is_over=self._is_over,
            interrupts=(AirflowTaskTimeout,),
            child=CHILD_HOST,
            max_shutdown=MAX_SHUTDOWN,
        )

    def _is_over(self, run_id: str) -> bool:
        alive = ["queued", "running"]
        return not self.ti.get_dr_count(dag_id=self.ti.dag_id, run_ids=[run_id], states=alive)

    @cached_property
    def run_info(self) -> RunInfo:
        """What callbacks may know about the run."""
        dag_run = self.context["dag_run"]
        return RunInfo(
            dag_id=self.ti.dag_id,
            run_id=self.ti.run_id,
            logical_date=dag_run.logical_date,
            data_interval_start=dag_run.data_interval_start,
            data_interval_end=dag_run.data_interval_end,
            params=dict(self.params),
            try_number=self.ti.try_number,
        )

    def load_pipeline(self, ref: Mapping[str, Any]) -> Pipeline:
        """Load the pipeline of a rendered reference; from then on a segmentation fault ends the
        task.

        :raises PipelineError: If it cannot be imported.
        :raises OptionsError: If an option, once rendered, breaks its rule.
        """
        _restore_segfault()
        return load_ref(ref, self.run_info)

    def open_run(
        self, staging: str | None, pipeline: Pipeline, *, report: bool = True
    ) -> StagedRun:
        """Open the run's staging folder, with the clock by which its leases are judged.

        :param staging: URI of the staging root; ``[broadway] staging`` if it is ``None``.
        :param report: Whether to log that this host's clock differs from the root's.
        :raises StagingError: If the root cannot be used, or the clocks make the lease useless.
        """
        from airflow_broadway.staging.run_folder import StagedRun

        store, producer, clock = open_store(staging), pipeline.producer, SystemClock()
        return StagedRun(
            store,
            pipeline=pipeline.name,
            dag_id=self.ti.dag_id,
            run_id=self.ti.run_id,
            airflow=deployment(),
            clock=clock
            if producer.local_clock
            else store.clock(float(producer.lease), clock, report=report),
        )

    # -- what the run was triggered with ---------------------------------------------------------

    def source_request(self, declared: str = "") -> SourceRequest:
        """Return where the run's messages should come from: by its params, or else by its type and
        data interval.

        :param declared: The source that the operator names.
        :raises RequestRefused: If a param is no timestamp, or Airflow keeps the choice of dead
            letters from the params: a run must not take the live queue instead.
        """
        dag_run = self.context["dag_run"]
        kind, start, end, past_run, batches, letters = (self.params.get(name) for name in PARAMS)
        if self._conf.get("dead_letters", letters) != letters:
            raise RequestRefused(
                "dead_letters was given, and Airflow hands no conf to the params of a run: turn"
                " [core] dag_run_conf_overrides_params on; nothing was received"
            )
        return SourceRequest(
            run_id=str(self.ti.run_id),
            kind=str(kind or declared),
            start=_instant("interval_start", start),
            end=_instant("interval_end", end),
            past_run=str(past_run or ""),
            batches=_names("source_batches", batches),
            letters=letters,
            backfill=str(getattr(dag_run.run_type, "value", dag_run.run_type)) == "backfill",
            interval=(dag_run.data_interval_start, dag_run.data_interval_end),
        )

    @property
    def _conf(self) -> Mapping[str, Any]:
        return getattr(self.context["dag_run"], "conf", None) or {}

    def is_dry_run(self) -> bool:
        """Whether the run should only look.

        :raises RequestRefused: If its param is no truth value, or Airflow keeps the run's conf from
            the params.
        """
        value = self.params.get("dry_run")
        if value is not None and not isinstance(value, bool):
            raise RequestRefused(f"dry_run is true or false, and not {value!r:.80}")
        requested = self._conf.get("dry_run", value)
        if requested != value:
            raise RequestRefused(
                f"dry_run={requested!r:.80} was asked for, and Airflow hands no values of a form to"
                " a run: turn [core] dag_run_conf_overrides_params on; nothing was received"
            )
        return bool(value)

    def backlog_events(self) -> list[Mapping[str, Any]]:
        """The backlog's events, if these alone triggered the run, and this is the task's first try.

        A task that is cleared, or tried again, does its work, whichever run has served the events.
        """
        payloads: list[Mapping[str, Any]] = []
        if self.ti.try_number > 1:
            return []
        for events in (self.context.get("triggering_asset_events") or {}).values():
            for event in events:
                payload = (event.extra or {}).get("payload")
                if not (
                    isinstance(payload, Mapping) and {"at", "crossing", "reason"} <= payload.keys()
                ):
                    return []
                payloads.append(payload)
        return payloads


def _is_supervised() -> bool:
    """Whether Airflow is another process, which a fork of this one can ask as well.

    In ``dag.test()`` it is threads of this process, and a fork has none of them.
    """
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import CommsDecoder

    return type(getattr(task_runner, "SUPERVISOR_COMMS", None)) is CommsDecoder


def _names(name: str, value: Any) -> Sequence[str]:
    """Returns the texts of a param that is a list of them."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise RequestRefused(f"{name} is no list of texts: {value!r:.80}")
    return value


def _instant(name: str, value: Any) -> datetime | None:
    """An instant of a param: text in ISO 8601; in UTC unless it says otherwise."""
    if value in (None, ""):
        return None
    try:
        found = datetime.fromisoformat(str(value))
    except ValueError:
        raise RequestRefused(
            f"{name} is no instant in ISO 8601, such as 2013-01-01T00:00:00Z: {value!r:.80}"
        ) from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def _restore_segfault() -> None:
    """Restore the signal's default action, which Airflow's Dag importer replaces in each task.

    Its handler is of Python: the faulty instruction is repeated for ever, and no try ever ends.
    """
    if threading.current_thread() is threading.main_thread() and callable(
        signal.getsignal(signal.SIGSEGV)
    ):
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)


def deployment() -> str:
    """The name of this Airflow, the same in all its tasks: ``[broadway] deployment``, or the
    address of the API server that tasks report to.  A loopback address names no deployment: host
    and ``AIRFLOW_HOME`` stand for it.

    A task knows neither the metadata database nor its address.
    """
    from airflow_broadway.staging.store import host_name

    given = conf.get("broadway", "deployment", fallback="")
    if given:
        return str(given)
    base_url = str(conf.get("api", "base_url", fallback="") or "")
    url = urlsplit(str(conf.get("core", "execution_api_server_url", fallback="") or base_url))
    host = url.hostname or "localhost"
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return f"{host_name()}:{os.environ.get('AIRFLOW_HOME', os.path.expanduser('~/airflow'))}"
    return f"{host}:{url.port}{url.path}" if url.port else f"{host}{url.path}"


def references(rendered: Any) -> Iterator[Mapping[str, Any]]:
    """The references in whatever a template renders: one, a list, a mapped task's outputs.

    Those of tasks that pushed none are left out.
    """
    if isinstance(rendered, Mapping):
        if rendered:
            yield rendered
    elif rendered is not None and not isinstance(rendered, str):
        # A slice gets a mapped task's outputs at once.  A loop over them asks for each, and for
        # one after the last, which Airflow logs as an error.
        for reference in rendered[:] if isinstance(rendered, Sequence) else rendered:
            yield from references(reference)
