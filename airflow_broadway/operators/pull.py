"""What the operators that receive have in common: a pipeline, one of its producers, a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import (
    AirflowFailException,
    AirflowSkipException,
    BaseOperator,
)

from airflow_broadway.adapters import task_docs
from airflow_broadway.adapters.links import AT_BROKER
from airflow_broadway.adapters.parsing import check_engine, pipeline_ref
from airflow_broadway.adapters.task import (
    asked_of,
    backlog_events,
    is_dry_run,
    ports_of,
    task_of,
)
from airflow_broadway.core.errors import OptionsError, RequestRefused
from airflow_broadway.core.model.rules import POSITIVE, SECONDS, SECONDS_OR_ZERO, Rule
from airflow_broadway.core.model.run_source import KINDS, RunSource

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

    from airflow_broadway.core.pipeline import Pipeline
    from airflow_broadway.core.stages.receiving import Budget
    from airflow_broadway.staging.run_folder import StagedRun

#: The budgets of a process task: its operator's arguments, and params that override them.
BUDGETS: Mapping[str, Rule] = {
    "max_messages": POSITIVE.or_none(),
    "max_bytes": POSITIVE.or_none(),
    "max_seconds": SECONDS.or_none(),
    "wait_seconds": SECONDS_OR_ZERO,
    "idle_seconds": SECONDS_OR_ZERO,
}

#: What they are unless given: a run ends after five minutes of pulling at the latest.
BUDGET_DEFAULTS: Mapping[str, Any] = {
    "max_messages": None,
    "max_bytes": None,
    "max_seconds": 300.0,
    "wait_seconds": 0.0,
    "idle_seconds": 1.0,
}


def check_budgets(
    owner: str, given: Mapping[str, Any], *, rendered: bool = False
) -> dict[str, Any]:
    """The budgets, each checked; text is a template while the Dag is parsed, and read afterwards.

    :raises OptionsError: Naming the argument, the rule and the value.
    """
    read: dict[str, Any] = {}
    for name, rule in BUDGETS.items():
        value = given[name]
        if isinstance(value, str):
            if "{{" in value and not rendered:
                read[name] = value
                continue
            if rendered and rule.read is not None:
                try:
                    value = rule.read(value)
                except ValueError:
                    raise OptionsError(f"{owner}.{name}", rule.text, value) from None
        if not rule.admits(value):
            raise OptionsError(f"{owner}.{name}", rule.text, value)
        read[name] = value
    if read["max_messages"] is None and read["max_seconds"] is None:
        raise OptionsError(
            f"{owner}.max_seconds", "a bound here or for max_messages (a run has an end)", None
        )
    return read


def budget_of(operator: Any, context: Context, source: RunSource | None = None) -> Budget:
    """The budget of this execution: the run's params where set, else the operator's arguments.

    A task with an ``execution_timeout`` stops pulling at four fifths of it, to have time to finish.
    A source that is past is read whole: it has no other bound.

    :param source: Of the run; the live queue unless given.

    :raises OptionsError: If one, once rendered, breaks its rule.
    """
    from airflow_broadway.core.stages.receiving import Budget
    from airflow_broadway.runs.sources.dead_letters import deletes

    params = context["params"]
    given = {
        name: getattr(operator, name) if params.get(name) is None else params[name]
        for name in BUDGETS
    }
    read = check_budgets(operator.task_id, given, rendered=True)
    if source is not None and source.is_whole:
        read.update(max_messages=None, max_bytes=None, max_seconds=None)
        if not source.asks_broker:  # nothing is there to be waited for
            read.update(wait_seconds=0.0, idle_seconds=0.0)
    if source is not None and deletes(source):
        read.update(max_messages=0)
    if operator.execution_timeout is not None:
        bound = 0.8 * operator.execution_timeout.total_seconds()
        read["max_seconds"] = min(bound, read["max_seconds"] or bound)
    return Budget(**read)


class PullOperator(BaseOperator):
    """What the operators that receive have in common: a pipeline, a producer of it, a budget."""

    template_fields: Sequence[str] = ("pipeline", *BUDGETS, "source", "staging")
    template_fields_renderers = {"pipeline": "json"}  # noqa: RUF012 - as in BaseOperator
    ui_color = "#e8f0fe"
    operator_extra_links = AT_BROKER

    #: What Airflow's UI shows about the task, and what the plugin knows it by.
    _about = task_docs.PROCESS
    _does = "process"

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
        kwargs.setdefault("doc_md", self._about)
        super().__init__(**kwargs)
        self.pipeline = pipeline_ref(pipeline, self._does)
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
        """Map it, e.g. ``.partial(task_id="pull", pipeline=…).expand(producer_index=[0, 1])``.

        Here too the pipeline becomes its reference at once: a class kept as an argument would put
        its source into the serialized Dag.
        """
        if "pipeline" in kwargs:
            kwargs["pipeline"] = pipeline_ref(kwargs["pipeline"], cls._does)
            cls._check_engine(kwargs["pipeline"])
        check_budgets(
            str(kwargs.get("task_id", cls.__name__)),
            {name: kwargs.get(name, default) for name, default in BUDGET_DEFAULTS.items()},
        )
        kwargs.setdefault("doc_md", cls._about)
        return super().partial(**kwargs)

    @classmethod
    def _check_engine(cls, ref: Mapping[str, Any]) -> None:
        """Refuse what the task could not run, where that can be told while the Dag is parsed."""
        check_engine(ref)


def serve_events(operator: PullOperator, context: Context, run: StagedRun) -> None:
    """Claim the events of a backlog that started this run.

    :raises AirflowSkipException: If another run has served them: nothing is taken twice, and
        nothing is left that they told of.
    """
    events = backlog_events(context)
    if not events:
        return
    from airflow_broadway.runs.backlog.served import claim_events

    served = claim_events(run, events)
    if served is not None:
        raise AirflowSkipException(f"{served}: nothing to do.")
    operator.log.info("This run was started by a backlog: %s.", events[-1]["reason"])


def looked(
    operator: PullOperator,
    context: Context,
    run: StagedRun,
    pipeline: Pipeline,
    source: RunSource,
    *,
    report: bool = False,
) -> dict[str, Any] | None:
    """What a dry run found, as the task's reference; ``None``: this is none, and works.

    :param report: Whether no other task keeps the run's report.
    :raises AirflowFailException: If a run like this one would be refused.
    """
    try:
        if not is_dry_run(context):
            return None
        from airflow_broadway.runs.sources.dry_run import DryRun

        return DryRun(
            run,
            pipeline,
            task_of(context),
            ports_of(context),
            index=operator.producer_index,
            budget=budget_of(operator, context, source),
            source=source,
        ).run(report=report)
    except RequestRefused as error:
        raise AirflowFailException(str(error)) from None


def source_of_run(operator: PullOperator, context: Context, pipeline: Pipeline) -> RunSource:
    """Where the run's messages come from.

    :raises AirflowFailException: If it cannot be served; another try would find the same.
    """
    from airflow_broadway.runs.sources.choice import choose_source

    try:
        asked = asked_of(context, operator.source)
        _check_named_pipeline(asked.letters, context)
        return choose_source(pipeline, asked)
    except RequestRefused as error:
        raise AirflowFailException(str(error)) from None


def _check_named_pipeline(letters: Any, context: Context) -> None:
    """Refuse dead letters of a pipeline that the Dag does not have: no task would move them.

    :raises RequestRefused: If the names of all pipelines of the Dag are known, and it is none.
    """
    dag, wanted = context.get("dag"), letters.get("pipeline") if isinstance(letters, dict) else None
    if dag is None or not wanted:
        return
    names: set[str | None] = set()
    for task in dag.tasks:
        arguments = getattr(task, "partial_kwargs", None) or vars(task)
        reference = arguments.get("pipeline")
        if isinstance(reference, Mapping) and reference.get("task") in ("process", "run"):
            # Of a class that was given as text, the name is known to its own runs alone.
            names.add((reference.get("about") or {}).get("name"))
    if names and wanted not in names and not any(n is None or "{{" in n for n in names):
        raise RequestRefused(
            f"dead_letters.pipeline is {wanted!r:.200}, and the pipelines of this Dag are"
            f" {sorted(map(str, names))}: correct the name; nothing was moved or received"
        )
