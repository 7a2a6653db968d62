"""Pull messages, run ``handle_message`` on each, and stage the results."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import (
    AirflowFailException,
    BaseOperator,
)

from airflow_broadway.core.errors import BroadwayError, OptionsError
from airflow_broadway.core.model.rules import POSITIVE, SECONDS, SECONDS_OR_ZERO, Rule
from airflow_broadway.core.text import many
from airflow_broadway.operators import _docs
from airflow_broadway.operators._common import (
    AirflowConnections,
    check_engine,
    load_pipeline,
    open_run,
    owner_of,
    pipeline_ref,
    producer_env,
)
from airflow_broadway.operators._metrics import Metric, Metrics

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

    from airflow_broadway.core.pipeline import Pipeline
    from airflow_broadway.core.stages.receiving import Budget
    from airflow_broadway.runs.process import Process
    from airflow_broadway.staging.run_folder import StagedRun

__all__ = ["BUDGETS", "BroadwayProcessorOperator"]

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


def budget_of(operator: Any, context: Context) -> Budget:
    """The budget of this execution: the run's params where set, else the operator's arguments.

    A task with an ``execution_timeout`` stops pulling at four fifths of it, to have time to finish.

    :raises OptionsError: If one, once rendered, breaks its rule.
    """
    from airflow_broadway.core.stages.receiving import Budget

    params = context["params"]
    given = {
        name: getattr(operator, name) if params.get(name) is None else params[name]
        for name in BUDGETS
    }
    read = check_budgets(operator.task_id, given, rendered=True)
    if operator.execution_timeout is not None:
        bound = 0.8 * operator.execution_timeout.total_seconds()
        read["max_seconds"] = min(bound, read["max_seconds"] or bound)
    return Budget(**read)


class PullOperator(BaseOperator):
    """What the operators that receive have in common: a pipeline, a producer of it, a budget."""

    template_fields: Sequence[str] = ("pipeline", *BUDGETS, "staging")
    template_fields_renderers = {"pipeline": "json"}  # noqa: RUF012 - as in BaseOperator
    ui_color = "#e8f0fe"

    #: What Airflow's UI shows about the task.
    _about = _docs.PROCESS

    def __init__(
        self,
        *,
        pipeline: Any,
        producer_index: int = 0,
        max_messages: int | str | None = BUDGET_DEFAULTS["max_messages"],
        max_bytes: int | str | None = BUDGET_DEFAULTS["max_bytes"],
        max_seconds: float | str | None = BUDGET_DEFAULTS["max_seconds"],
        wait_seconds: float | str = BUDGET_DEFAULTS["wait_seconds"],
        idle_seconds: float | str = BUDGET_DEFAULTS["idle_seconds"],
        staging: str | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("doc_md", self._about)
        super().__init__(**kwargs)
        self.pipeline = pipeline_ref(pipeline)
        self._check_engine(self.pipeline)
        self.producer_index = producer_index
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.max_seconds = max_seconds
        self.wait_seconds = wait_seconds
        self.idle_seconds = idle_seconds
        self.staging = staging
        check_budgets(self.task_id, {name: getattr(self, name) for name in BUDGETS})

    @classmethod
    def partial(cls, **kwargs: Any) -> OperatorPartial:
        """Map it, e.g. ``.partial(task_id="pull", pipeline=…).expand(producer_index=[0, 1])``.

        Here too the pipeline becomes its reference at once: a class kept as an argument would put
        its source into the serialized Dag.
        """
        if "pipeline" in kwargs:
            kwargs["pipeline"] = pipeline_ref(kwargs["pipeline"])
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


class BroadwayProcessorOperator(PullOperator):
    """Pull messages within a budget, run ``handle_message`` on each, and stage the results.

    Returns a reference to the published manifest, never payloads: XCom lives in the metadata
    database.  Never skips: an empty queue gives an empty manifest.  Map it over ``producer_index``
    for several producers.

    :param pipeline: A :class:`Broadway` subclass, an instance, or its import path such as
        ``"shop.orders:Orders"``. (templated)
    :param producer_index: Which of the producers this is, from 0.
    :param max_messages: Stop after this many messages of this task; ``None``: no bound. (templated)
    :param max_bytes: Stop once payloads of this many bytes were received. (templated)
    :param max_seconds: Stop pulling after this many seconds, even if messages remain. (templated)
    :param wait_seconds: How long to wait for the first message. (templated)
    :param idle_seconds: Stop after this long without a message. (templated)
    :param staging: URI of the staging root; ``[broadway] staging`` unless given. (templated)

    Params of the run with the same names as the five budgets, where not null, override them.

    :raises OptionsError: While the Dag is parsed, if a budget breaks its rule.
    """

    _process: Process | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        from airflow_broadway.runs.process import Process
        from airflow_broadway.runs.sweep import give_back
        from airflow_broadway.staging.rate_state import StagedRateState

        pipeline = load_pipeline(self.pipeline, context)
        refuse_backfill(context, pipeline.producer.kind)
        run = open_run(context, self.staging, pipeline.name)
        connections = AirflowConnections()
        give_back(run, pipeline, context, connections)
        metrics = Metrics(pipeline.name, run.dag_id)
        self._clear_up(run)
        self._process = Process(
            run,
            pipeline,
            env=producer_env(
                pipeline,
                generation=uuid.uuid4().hex,
                owner=owner_of(context),
                index=self.producer_index,
                store=run.store,
                connections=connections,
            ),
            budget=budget_of(self, context),
            rate_state=StagedRateState(run),
        )
        reference = self._process.run()
        metrics.count(Metric.RECEIVED, reference["received"])
        metrics.count(Metric.FAILED, reference["failed"])
        metrics.count(Metric.DEAD_LETTERED, reference.get("set_aside", 0))
        if self._process.timed_out:
            # A retry would void what was published: later tasks get the reference all the same.
            context["ti"].xcom_push(key="return_value", value=reference)
            raise AirflowFailException(
                f"The execution_timeout of {self.execution_timeout} passed while callbacks were at"
                f" work.  What was done by then is published and goes on; the rest is given back"
            )
        self._tell_depth(pipeline, connections, metrics)
        if self._process.trouble:  # all is settled: trying again would only take more
            raise AirflowFailException(
                f"All messages are settled or given back, but {self._process.trouble}"
            )
        ended = ended_sensor(self.task_id, context)
        if ended and reference["received"] and pipeline.batchers:
            # Cleared alone: without this the run would be green, and its messages held.
            context["ti"].xcom_push(key="return_value", value=reference)
            raise AirflowFailException(
                f"{many(reference['received'], 'message')} are received and held, and {ended!r} of"
                " this run, which would settle them, has ended: clear it, and the tasks between,"
                " too.  Otherwise the next run gives these messages back"
            )
        return reference

    def _clear_up(self, run: StagedRun) -> None:
        """Remove what has been kept for long enough."""
        from airflow_broadway.staging.retention import sweep_retention

        try:
            sweep_retention(run.store, run.pipeline, run.dag_id, spared=[run.run_id])
        except BroadwayError as error:
            # Whoever may write there need not be allowed to delete; that is in no run's way.
            self.log.warning("Could not remove the files of old runs: %s", error)

    def _tell_depth(
        self, pipeline: Pipeline, connections: AirflowConnections, metrics: Metrics
    ) -> None:
        env = producer_env(pipeline, generation="", owner={}, connections=connections)
        try:
            depth = pipeline.producer.depth(env)
        except Exception as error:
            # Only a gauge: what was received has been published.
            self.log.warning("Could not ask how full the queue is: %s", error)
            return
        if depth is not None:
            metrics.depth(depth)

    def on_kill(self) -> None:
        if self._process is not None:
            self._process.stop("signal")


def ended_sensor(task_id: str, context: Context) -> str | None:
    """The ack sensor that watches this task, if it has ended in this run."""
    from airflow_broadway.sensors.ack import BroadwayAckSensor
    from airflow_broadway.triggers.ack import FINISHED

    ti, dag = context["ti"], context.get("dag")
    for task in dag.tasks if dag is not None else ():
        if isinstance(task, BroadwayAckSensor) and task_id in task.watched(context):
            states = ti.get_task_states(
                dag_id=ti.dag_id, run_ids=[ti.run_id], task_ids=[task.task_id]
            )
            if states.get(ti.run_id, {}).get(task.task_id) in FINISHED:
                return str(task.task_id)
    return None


def refuse_backfill(context: Context, kind: str) -> None:
    """Keep a backfill off a live queue.

    :raises AirflowFailException: Another try would find the same.
    """
    dag_run = context["dag_run"]
    if str(getattr(dag_run.run_type, "value", dag_run.run_type)) == "backfill":
        raise AirflowFailException(
            f"run {dag_run.run_id!r} is a backfill, and the producer {kind!r} reads a live queue,"
            " which knows nothing of the past interval: nothing was received.  Trigger the Dag"
            " instead: a run takes what is in the queue, whenever it was sent.  To handle the"
            " messages of a past run again: airflow-broadway replay --dag-id … --run-id …"
        )
