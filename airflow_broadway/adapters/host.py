"""Reads an Airflow task's context: the task, its run, and the run's parameters."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
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
from airflow_broadway.core.text import parse_timestamp
from airflow_broadway.runs.ports import Ports, Task
from airflow_broadway.runs.sources.choice import PARAMS, SourceRequest

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_broadway.staging.run_folder import StagedRun

#: Seconds that a task may take, after a stop request, to finish.  Airflow kills it after five, and
#: results must be stored by then.
MAX_SHUTDOWN: Final = 2.0


class Host:
    """The Airflow side of a task, read from its context.

    :param context: The ``context`` of an operator's ``execute``.
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
            # Airflow increases it with the tries that a clear adds.
            cleared=getattr(self.ti, "max_tries", None) or 0,
            forks=is_supervised(),
        )

    @cached_property
    def ports(self) -> Ports:
        """The parts of Airflow that ``runs`` may use."""
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
        """The information on the run for callbacks."""
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
        """Loads the pipeline of a rendered reference; restores the default action of SIGSEGV.

        :raises PipelineError: If it cannot be imported.
        :raises OptionsError: If an option, once rendered, breaks its rule.
        """
        _restore_sigsegv()
        return load_ref(ref, self.run_info)

    def open_run(
        self, staging: str | None, pipeline: Pipeline, *, report: bool = True
    ) -> StagedRun:
        """Opens the run's staging folder, with the clock that judges its leases.

        :param staging: URI of the staging root; ``[broadway] staging`` if it is ``None``.
        :param report: Whether to log that this host's clock differs from the root's.
        :raises StagingError: If the root cannot be used, or the clocks cannot be compared precisely
            enough for the lease.
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

    # -- the run's parameters --------------------------------------------------------------------

    def source_request(self, declared: str = "") -> SourceRequest:
        """Returns the requested source of the run's messages: by its params, or else by its type
        and data interval.

        :param declared: The operator's ``source``.
        :raises RequestRefused: If a param is not a timestamp, or Airflow does not pass the conf's
            dead-letter filter to the params: a run must not drain the live queue instead.
        """
        dag_run = self.context["dag_run"]
        kind, start, end, past_run, batches, letters = (self.params.get(name) for name in PARAMS)
        self._check_passed("dead_letters", letters, "dead_letters is set")
        return SourceRequest(
            run_id=str(self.ti.run_id),
            kind=str(kind or declared),
            start=_parse_timestamp("interval_start", start),
            end=_parse_timestamp("interval_end", end),
            past_run=str(past_run or ""),
            batches=_check_names("source_batches", batches),
            letters=letters,
            backfill=str(getattr(dag_run.run_type, "value", dag_run.run_type)) == "backfill",
            interval=(dag_run.data_interval_start, dag_run.data_interval_end),
        )

    def _check_passed(self, name: str, value: Any, text: str) -> None:
        """Refuses a param that differs from the run's conf: Airflow does not pass it on."""
        requested = (getattr(self.context["dag_run"], "conf", None) or {}).get(name, value)
        if requested != value:
            raise RequestRefused(
                f"{text.format(requested)}, but Airflow does not pass the conf of a run to its"
                " params: turn [core] dag_run_conf_overrides_params on; nothing was received"
            )

    def is_dry_run(self) -> bool:
        """Returns whether the run is a dry run.

        :raises RequestRefused: If its param is not a boolean, or Airflow does not pass the run's
            conf to the params.
        """
        value = self.params.get("dry_run")
        if value is not None and not isinstance(value, bool):
            raise RequestRefused(f"dry_run is true or false, and not {value!r:.80}")
        self._check_passed("dry_run", value, "dry_run={!r:.80} was requested")
        return bool(value)

    def backlog_events(self) -> list[Mapping[str, Any]]:
        """Returns the backlog's events, if only these triggered the run, and on the first try.

        A cleared or retried task does its work, even if another run has served the events.
        """
        if self.ti.try_number > 1:
            return []
        assets = (self.context.get("triggering_asset_events") or {}).values()
        events = [event for group in assets for event in group]
        payloads: list[Any] = [(event.extra or {}).get("payload") for event in events]
        keys = {"at", "crossing", "reason"}
        if all(isinstance(one, Mapping) and keys <= one.keys() for one in payloads):
            return payloads
        return []


def is_supervised() -> bool:
    """Returns whether Airflow is another process, which a fork of this one can reach as well.

    In ``dag.test()`` Airflow is threads of this process, which a fork does not have.
    """
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import CommsDecoder

    return type(getattr(task_runner, "SUPERVISOR_COMMS", None)) is CommsDecoder


def _check_names(name: str, value: Any) -> Sequence[str]:
    """Returns the value of a param that is a list of strings."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RequestRefused(f"{name} is not a list of strings: {value!r:.80}")
    return value


def _parse_timestamp(name: str, value: Any) -> datetime | None:
    """Parses a param's ISO 8601 timestamp; without a time zone it is UTC."""
    if value in (None, ""):
        return None
    try:
        return parse_timestamp(str(value))
    except ValueError:
        raise RequestRefused(
            f"{name} is not an ISO 8601 timestamp, such as 2013-01-01T00:00:00Z: {value!r:.80}"
        ) from None


def _restore_sigsegv() -> None:
    """Restores the signal's default action, which Airflow's Dag importer replaces in each task.

    Its handler is in Python: the faulty instruction is repeated for ever, and the try never ends.
    """
    if threading.current_thread() is threading.main_thread() and callable(
        signal.getsignal(signal.SIGSEGV)
    ):
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)


def deployment() -> str:
    """Returns this Airflow's name, equal in all its tasks: ``[broadway] deployment``, or the
    address of the API server that tasks use.  A loopback address is ambiguous: host and
    ``AIRFLOW_HOME`` are used instead.

    A task does not know the address of the metadata database.
    """
    from airflow_broadway.staging.store import host_name

    name = conf.get("broadway", "deployment", fallback="")
    if name:
        return str(name)
    base_url = str(conf.get("api", "base_url", fallback="") or "")
    url = urlsplit(str(conf.get("core", "execution_api_server_url", fallback="") or base_url))
    host = url.hostname or "localhost"
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return f"{host_name()}:{os.environ.get('AIRFLOW_HOME', os.path.expanduser('~/airflow'))}"
    return f"{host}:{url.port}{url.path}" if url.port else f"{host}{url.path}"


def references(rendered: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the references in a rendered template: one, a list, a mapped task's outputs.

    Tasks that pushed none are omitted.
    """
    if isinstance(rendered, Mapping):
        if rendered:
            yield rendered
    elif rendered is not None and not isinstance(rendered, str):
        # A slice requests a mapped task's outputs together.  A loop requests each, and one after
        # the last, which Airflow logs as an error.
        for reference in rendered[:] if isinstance(rendered, Sequence) else rendered:
            yield from references(reference)
