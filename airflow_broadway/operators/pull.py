"""The base class of operators that receive: a pipeline, one of its producers, a budget."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import (
    AirflowFailException,
    AirflowSkipException,
    BaseOperator,
)

from airflow_broadway.adapters import task_docs
from airflow_broadway.adapters.host import Host
from airflow_broadway.adapters.lineage import LineageMixin, report_execution
from airflow_broadway.adapters.links import AT_BROKER, note_console
from airflow_broadway.adapters.parsing import check_engine, pipeline_ref
from airflow_broadway.adapters.tracing import receiving_span
from airflow_broadway.core.errors import OptionsError, RequestRefused
from airflow_broadway.core.model.rules import POSITIVE, SECONDS, SECONDS_OR_ZERO, Rule
from airflow_broadway.core.model.run_source import KINDS, RunSource

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

    from airflow_broadway.core.pipeline import Pipeline
    from airflow_broadway.core.stages.receiving import Budget
    from airflow_broadway.runs.tasks import ProcessTask, UnstagedTask
    from airflow_broadway.staging.run_folder import StagedRun

    PullTask = ProcessTask | UnstagedTask

#: The budgets of a process task: operator arguments, and params that override them.
BUDGETS: Mapping[str, Rule] = {
    "max_messages": POSITIVE.or_none(),
    "max_bytes": POSITIVE.or_none(),
    "max_seconds": SECONDS.or_none(),
    "wait_seconds": SECONDS_OR_ZERO,
    "idle_seconds": SECONDS_OR_ZERO,
}

#: Their defaults: a run stops receiving after five minutes at the latest.
BUDGET_DEFAULTS: Mapping[str, Any] = {
    "max_messages": None,
    "max_bytes": None,
    "max_seconds": 300.0,
    "wait_seconds": 0.0,
    "idle_seconds": 1.0,
}


def check_budgets(
    owner: str, arguments: Mapping[str, Any], *, rendered: bool = False
) -> dict[str, Any]:
    """Validates the budgets; text is a template while the Dag is parsed, and parsed once rendered.

    :raises OptionsError: Naming the argument, the rule and the value.
    """
    budgets: dict[str, Any] = {}
    for name, rule in BUDGETS.items():
        value = arguments[name]
        if isinstance(value, str):
            if "{{" in value and not rendered:
                budgets[name] = value
                continue
            if rendered and rule.read is not None:
                try:
                    value = rule.read(value)
                except ValueError:
                    raise OptionsError(f"{owner}.{name}", rule.text, value) from None
        if not rule.admits(value):
            raise OptionsError(f"{owner}.{name}", rule.text, value)
        budgets[name] = value
    if budgets["max_messages"] is None and budgets["max_seconds"] is None:
        raise OptionsError(
            f"{owner}.max_seconds", "a limit here or for max_messages (a run has an end)", None
        )
    return budgets


def budget_of(operator: Any, host: Host, source: RunSource | None = None) -> Budget:
    """Returns the budget of this execution: the run's params if set, else the operator's arguments.

    A task with an ``execution_timeout`` stops receiving at four fifths of it, to have time to
    finish.  A source of the past is read whole: it has no other limit.

    :param source: The run's source; by default the live queue.
    :raises OptionsError: If a budget, once rendered, breaks its rule.
    """
    from airflow_broadway.core.stages.receiving import Budget
    from airflow_broadway.runs.sources.dead_letters import deletes

    arguments = {
        name: getattr(operator, name) if host.params.get(name) is None else host.params[name]
        for name in BUDGETS
    }
    budgets = check_budgets(operator.task_id, arguments, rendered=True)
    if source is not None and source.is_whole:
        budgets.update(max_messages=None, max_bytes=None, max_seconds=None)
        if not source.asks_broker:  # all messages exist already
            budgets.update(wait_seconds=0.0, idle_seconds=0.0)
    if source is not None and deletes(source):
        budgets.update(max_messages=0)
    if operator.execution_timeout is not None:
        bound = 0.8 * operator.execution_timeout.total_seconds()
        budgets["max_seconds"] = min(bound, budgets["max_seconds"] or bound)
    return Budget(**budgets)


class PullOperator(LineageMixin, BaseOperator):
    """The base class of operators that receive: a pipeline, one of its producers, a budget."""

    template_fields: Sequence[str] = ("pipeline", *BUDGETS, "source", "staging")
    template_fields_renderers = {"pipeline": "json"}  # noqa: RUF012 - as in BaseOperator
    ui_color = "#e8f0fe"
    operator_extra_links = AT_BROKER

    #: The task's documentation in Airflow's UI, and its kind, by which the plugin identifies it.
    _task_docs = task_docs.PROCESS
    _task_kind = "process"

    def __init__(
        self,
        *,
        pipeline: Any,
        producer_index: int | None = None,
        max_messages: int | str | None = BUDGET_DEFAULTS["max_messages"],
        max_bytes: int | str | None = BUDGET_DEFAULTS["max_bytes"],
        max_seconds: float | str | None = BUDGET_DEFAULTS["max_seconds"],
        wait_seconds: float | str = BUDGET_DEFAULTS["wait_seconds"],
        idle_seconds: float | str = BUDGET_DEFAULTS["idle_seconds"],
        source: str = "",
        staging: str | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("doc_md", self._task_docs)
        super().__init__(**kwargs)
        self.pipeline = pipeline_ref(pipeline, self._task_kind)
        self._check_engine(self.pipeline)
        self.producer_index = producer_index
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.max_seconds = max_seconds
        self.wait_seconds = wait_seconds
        self.idle_seconds = idle_seconds
        self.source = source
        if source and source not in KINDS and "{{" not in source:
            raise OptionsError(f"{self.task_id}.source", f"one of {sorted(KINDS)}", source)
        self.staging = staging
        check_budgets(self.task_id, {name: getattr(self, name) for name in BUDGETS})

    @classmethod
    def partial(cls, **kwargs: Any) -> OperatorPartial:
        """Maps it, e.g. ``.partial(task_id="pull", pipeline=…).expand(producer_index=[0, 1])``.

        Here too the pipeline is replaced by its reference immediately: a class as an argument would
        put its source code into the serialized Dag.
        """
        if "pipeline" in kwargs:
            kwargs["pipeline"] = pipeline_ref(kwargs["pipeline"], cls._task_kind)
            cls._check_engine(kwargs["pipeline"])
        check_budgets(
            str(kwargs.get("task_id", cls.__name__)),
            {name: kwargs.get(name, default) for name, default in BUDGET_DEFAULTS.items()},
        )
        kwargs.setdefault("doc_md", cls._task_docs)
        return super().partial(**kwargs)

    @classmethod
    def _check_engine(cls, ref: Mapping[str, Any]) -> None:
        """Refuses a pipeline that the task cannot run, if known while the Dag is parsed."""
        check_engine(ref)

    def execute(self, context: Context) -> dict[str, Any]:
        host = Host(context)
        pipeline = host.load_pipeline(self.pipeline)
        self._check_pipeline(pipeline)
        run = host.open_run(self.staging, pipeline)
        note_console(self, pipeline, host.ports)
        source = source_of_run(self, host, pipeline)
        self._check_source(source)
        work: dict[str, Any] = {
            "staged": run,
            "pipeline": pipeline,
            "task": host.task,
            "ports": host.ports,
            "index": self.producer_index,
            "budget": budget_of(self, host, source),
            "source": source,
        }
        try:
            if host.is_dry_run():
                from airflow_broadway.runs.sources.dry_run import DryRun

                return DryRun(**work).run(report=self._keeps_report)
            self._claim_events(host, run)
            with receiving_span(pipeline):
                return self._pull(host, work)
        except RequestRefused as error:  # a retry would fail alike
            raise AirflowFailException(str(error)) from None

    #: Whether this task writes the run's report, instead of the ack sensor.
    _keeps_report = False
    #: The running task, once it has started.
    _task: PullTask | None = None

    def _check_pipeline(self, pipeline: Pipeline) -> None:
        """Refuses a rendered pipeline that this operator cannot run."""

    def _check_source(self, source: RunSource) -> None:
        """Refuses a source that this operator does not support."""

    @abstractmethod
    def _pull(self, host: Host, work: Mapping[str, Any]) -> dict[str, Any]:
        """Receives and handles messages; returns the task's reference.

        :param work: The arguments of a :class:`ProcessTask`, or :class:`UnstagedTask`.
        """

    def _report(self, host: Host, work: Mapping[str, Any], counts: Mapping[str, Any]) -> None:
        """Reports this execution to OpenTelemetry and OpenLineage."""
        connections = host.ports.connections
        report_execution(self, work["pipeline"], connections, counts, lambda: work["source"])

    def _claim_events(self, host: Host, run: StagedRun) -> None:
        """Claims the events of a backlog that started this run.

        :raises AirflowSkipException: If another run has served them: nothing is received twice, and
            none of the reported messages is left.
        """
        events = host.backlog_events()
        if not events:
            return
        from airflow_broadway.runs.backlog.served import claim_events

        served = claim_events(run, events)
        if served is not None:
            raise AirflowSkipException(f"{served}: nothing to do.")
        self.log.info("This run was started by a backlog: %s.", events[-1]["reason"])

    def on_kill(self) -> None:
        if self._task is not None:
            self._task.stop()


def source_of_run(operator: PullOperator, host: Host, pipeline: Pipeline) -> RunSource:
    """Returns the source of the run's messages.

    :raises AirflowFailException: If it is not supported; a retry would fail alike.
    """
    from airflow_broadway.runs.sources.choice import choose_source

    try:
        request = host.source_request(operator.source)
        _check_named_pipeline(request.letters, host.context)
        return choose_source(pipeline, request)
    except RequestRefused as error:
        raise AirflowFailException(str(error)) from None


def _check_named_pipeline(letters: Any, context: Context) -> None:
    """Refuses dead letters of a pipeline that the Dag does not have: no task would requeue them.

    :raises RequestRefused: If the names of all pipelines of the Dag are known, and it is not among
        them.
    """
    dag, wanted = context.get("dag"), letters.get("pipeline") if isinstance(letters, dict) else None
    if dag is None or not wanted:
        return
    names: set[str | None] = set()
    for task in dag.tasks:
        arguments = getattr(task, "partial_kwargs", None) or vars(task)
        reference = arguments.get("pipeline")
        if isinstance(reference, Mapping) and reference.get("task") in ("process", "run"):
            # The name of a class passed as text is known only to its own runs.
            names.add((reference.get("about") or {}).get("name"))
    if names and wanted not in names and not any(n is None or "{{" in n for n in names):
        raise RequestRefused(
            f"dead_letters.pipeline is {wanted!r:.200}, and the pipelines of this Dag are"
            f" {sorted(map(str, names))}: correct the name; nothing was moved or received"
        )
