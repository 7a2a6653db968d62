"""Builds the task group, the Dag and the params of a pipeline.

The tasks and their order::

    process (mapped) ──► batch.<batcher> … ──► handle_batches ──► ack ──► (what follows the group)

``ack`` is downstream of all of them, yet starts with the run: its trigger rule is ``"always"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from inspect import Parameter, cleandoc, signature
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, Asset, AssetWatcher, Param, TaskGroup

from airflow_broadway.adapters.outlets import with_outlets
from airflow_broadway.adapters.parsing import check_engine, declared, pipeline_ref
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.backlog import Backlog
from airflow_broadway.core.model.run_source import (
    ARCHIVE,
    DEAD_LETTERS,
    KINDS,
    LIVE,
    LOG,
    RUN,
)
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.sensors.ack import BroadwayAckSensor

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.definitions.mappedoperator import MappedOperator


#: The default arguments of tasks.  Two retries bridge a broker's restart or a lost worker.
DEFAULT_ARGS: Mapping[str, Any] = {"retries": 2, "retry_delay": timedelta(seconds=10)}


#: The sections of the form, in which Airflow's UI shows the params.
_SOURCE, _BUDGET = "Source of messages", "Budget"
#: Source → its label in the form; ``null`` is an empty field.
_SOURCES: Mapping[str, str] = {
    "null": "As usual: the queue, or a backfill's own interval",
    LIVE: "The live queue",
    ARCHIVE: "An interval of the archive",
    DEAD_LETTERS: "The dead letters, sent back to the queue",
    LOG: "An interval of the broker's own log (Kafka)",
    RUN: "The batches of a past run, as they were",
}


def make_params() -> dict[str, Param]:
    """Returns the source, the budgets and the dry run as params, for "Trigger" in the UI.

    They are empty by default, so that they do not affect scheduled runs.
    """
    return _source_params() | _budget_params()


def _source_params() -> dict[str, Param]:
    """Returns the params of the run's source."""
    text: dict[str, Any] = {"type": ["null", "string"], "section": _SOURCE}
    timestamp = {**text, "format": "date-time"}
    interval = "Of an archive or a log.  Empty: as the run's data interval."
    return {
        "source": Param(
            None,
            **text,
            enum=[None, *KINDS],
            values_display=_SOURCES,
            title="Source",
            description="Where the messages come from.",
        ),
        "interval_start": Param(
            None,
            **timestamp,
            title="Interval from",
            description=f"{interval}  Included.",
        ),
        "interval_end": Param(
            None,
            **timestamp,
            title="Interval to",
            description=f"{interval}  Not included.",
        ),
        "source_run": Param(
            None,
            **text,
            title="Past run",
            description="The run id of the run of this Dag whose batches are handled again.",
        ),
        "source_batches": Param(
            None,
            type=["null", "array"],
            items={"type": "string"},
            section=_SOURCE,
            title="Its batches",
            description="The ids of those batches, one a line.  Empty: all that were handled.",
        ),
        "dry_run": Param(
            False,
            type="boolean",
            section=_SOURCE,
            title="Dry run: only look",
            description="Report how many messages a run would receive, and receive none.",
        ),
    }


def _budget_params() -> dict[str, Param]:
    """Returns the params of the budgets; a past source is always read whole."""
    docs = {
        "max_messages": ("integer", 1, "Messages", "Stop after this many, per producer."),
        "max_bytes": ("integer", 1, "Bytes", "Stop once this many were received, per producer."),
        "max_seconds": ("number", 1, "Seconds", "Stop receiving after so many seconds."),
        "wait_seconds": ("number", 0, "Seconds to wait", "How long the first message may take."),
        "idle_seconds": ("number", 0, "Idle seconds", "Stop after this time without a message."),
    }
    return {
        name: Param(
            None,
            type=["null", kind],
            minimum=minimum,
            section=_BUDGET,
            title=title,
            description=f"{text}  Empty: as the Dag defines.",
        )
        for name, (kind, minimum, title, text) in docs.items()
    }


def make_task_group(
    pipeline: Pipeline,
    group_id: str = "broadway",
    *,
    process: Mapping[str, Any] | None = None,
    batch: Mapping[str, Any] | None = None,
    spark: Mapping[str, Any] | None = None,
    ack: Mapping[str, Any] | None = None,
    default_args: Mapping[str, Any] | None = None,
    staging: str | None = None,
    **kwargs: Any,
) -> TaskGroup:
    """Creates the tasks of a pipeline.

    :param process: Arguments of the process tasks: budgets, and any that Airflow accepts (pool,
        queue, executor_config, execution_timeout, callbacks, outlets…).
    :param batch: Arguments of the batcher tasks.
    :param spark: Arguments of the Spark tasks: any of ``SparkSubmitOperator``.
    :param ack: Arguments of the ack sensor, such as ``fail_when``, ``hold_failed`` and
        ``on_failure_callback``.
    :param default_args: For all tasks; ``retries`` is 2 and ``retry_delay`` 10 s unless given.
    :param staging: URI of the staging root.
    :raises OptionsError: While the Dag is parsed.
    """
    _check_arguments("task_group", make_task_group, TaskGroup, kwargs)
    ref = pipeline_ref(pipeline)
    check_engine(ref)
    merged: Any = {**DEFAULT_ARGS, **(default_args or {})}
    with TaskGroup(group_id, default_args=merged, **kwargs) as group:
        common: dict[str, Any] = {"pipeline": ref, "staging": staging}
        processes = _process_tasks(pipeline, common, process or {})
        batchers = {
            name: BroadwayBatcherOperator(
                task_id=f"batch.{name}",
                batcher=name,
                processed=processes.output,
                **common,
                **_batch_arguments(pipeline, name, batch or {}),
            )
            for name in pipeline.batchers
        }
        applications = _spark_tasks(pipeline, batchers, common, spark or {})
        watched: list[Any] = [processes, *batchers.values(), *applications]
        settle = BroadwayAckSensor(
            task_id="ack",
            watch=[task.task_id if hasattr(task, "task_id") else task for task in watched],
            **common,
            **(ack or {}),
        )
        # The group's only leaf, so that tasks after the group wait for it alone: a batcher without
        # messages is skipped, and its downstream tasks would be skipped, too.
        watched >> settle
    _check_lease(pipeline, group.dag, "process", process or {})
    _check_name(pipeline, group)
    return group


def _check_arguments(
    path: str, function: Callable[..., Any], of: Callable[..., Any], args: Mapping[str, Any]
) -> None:
    """Refuses an argument that neither the function nor the Airflow class accepts.

    :raises OptionsError: Naming the valid arguments and the nearest.
    """
    named = [*signature(function).parameters.values(), *signature(of).parameters.values()]
    valid = {item.name for item in named if item.kind is not Parameter.VAR_KEYWORD} - {"pipeline"}
    for name, value in args.items():
        if name not in valid:
            raise OptionsError.unknown(f"{path}.{name}", value, valid)


def _process_tasks(
    pipeline: Pipeline, common: Mapping[str, Any], args: Mapping[str, Any]
) -> MappedOperator:
    """Creates a task for each of the producer's ``concurrency``."""
    concurrency = pipeline.producer.concurrency
    if isinstance(concurrency, str):
        raise OptionsError(
            "producer.concurrency",
            "a number, not a template: it says how many process tasks the Dag has",
            concurrency,
        )
    task = BroadwayProcessorOperator.partial(task_id="process", **common, **args)
    return task.expand(producer_index=list(range(concurrency)))


def _batch_arguments(
    pipeline: Pipeline, batcher: str, args: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns a batcher task's arguments, with the batcher's outlets if it handles the batches."""
    if pipeline.batchers[batcher].engine == "spark":
        return args
    return with_outlets(args, pipeline, [batcher])


def _spark_tasks(
    pipeline: Pipeline,
    batchers: Mapping[str, BroadwayBatcherOperator],
    common: Mapping[str, Any],
    args: Mapping[str, Any],
) -> list[BaseOperator]:
    """Creates a task for all Spark batchers, and one for each with ``own_application``."""
    names = [name for name, options in pipeline.batchers.items() if options.engine == "spark"]
    shared = [name for name in names if not pipeline.batchers[name].own_application]
    tasks: list[tuple[str, list[str]]] = [("handle_batches", shared)] if shared else []
    tasks += [(f"handle_batches.{name}", [name]) for name in names if name not in shared]
    if not tasks:
        if args:
            raise OptionsError("spark", "no arguments, since no batcher uses Spark", dict(args))
        return []
    from airflow_broadway.operators.spark_submit import (
        BroadwaySparkSubmitOperator,
    )

    return [
        BroadwaySparkSubmitOperator(
            task_id=task_id,
            batches=[batchers[name].output for name in batch_names],
            **common,
            **with_outlets(args, pipeline, batch_names),
        )
        for task_id, batch_names in tasks
    ]


def _check_lease(
    pipeline: Pipeline, dag: DAG | None, name: str, arguments: Mapping[str, Any]
) -> None:
    """Refuses a lease that cannot be renewed and is shorter than the run may take.

    :param name: Of the tasks that receive, and of their arguments.
    """
    producer = pipeline.producer
    if producer.renews:
        return
    limits = {f"{name}.max_seconds": arguments.get("max_seconds", 300.0)}
    if dag is not None and dag.dagrun_timeout is not None:
        limits["dagrun_timeout"] = dag.dagrun_timeout.total_seconds()
    for limit, seconds in limits.items():
        known = isinstance(seconds, int | float) and isinstance(producer.lease, int | float)
        if known and seconds >= producer.lease:
            raise OptionsError(
                "producer.lease",
                f"more than {limit} ({seconds:g} s): {producer.kind} cannot renew a lease, and what"
                " outlasts it is delivered again",
                producer.lease,
            )


def _check_name(pipeline: Pipeline, group: TaskGroup) -> None:
    """Refuses a second pipeline of a name in a Dag: reports and heartbeats are named by it."""
    for task in group.dag.tasks if group.dag is not None else ():
        if not isinstance(task, BroadwayAckSensor) or task.task_group is group:
            continue
        other = declared(task.pipeline)
        if other is not None and other.name == pipeline.name:
            raise OptionsError(
                "name",
                f"another name than that of the pipeline of {task.task_id!r} in the same Dag, such"
                f" as name={pipeline.name + '_' + str(group.group_id)!r}",
                pipeline.name,
            )


def make_dag(
    pipeline: Pipeline,
    dag_id: str,
    *,
    process: Mapping[str, Any] | None = None,
    batch: Mapping[str, Any] | None = None,
    spark: Mapping[str, Any] | None = None,
    ack: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    default_args: Mapping[str, Any] | None = None,
    staging: str | None = None,
    **kwargs: Any,
) -> DAG:
    """Creates a Dag of one pipeline; ``kwargs`` are Airflow's own for :class:`DAG`.

    By default it has one active run and no catch-up: a live queue has no past intervals.

    :param run: Arguments of :class:`BroadwayRunOperator`: the Dag is its one task, ``run``, instead
        of the task group.
    :param kwargs: Their ``schedule`` may be what :func:`airflow_broadway.backlog` returns.
    """
    _check_arguments("dag", make_dag, DAG, kwargs)
    args = {
        "schedule": None,
        "catchup": False,
        "max_active_runs": 1,
        "params": make_params(),
        **kwargs,
    }
    if isinstance(args["schedule"], Backlog):
        args["schedule"] = _backlog_asset(pipeline, dag_id, args, staging)
    # The UI shows the class's own docstring, not an inherited one.
    own = type(pipeline).__dict__.get("__doc__")
    args.setdefault("doc_md", cleandoc(own) if own else None)
    if run is not None:
        from airflow_broadway.operators.run import BroadwayRunOperator

        stages = {"process": process, "batch": batch, "spark": spark, "ack": ack}
        for name, value in stages.items():
            if value is not None:
                raise OptionsError(f"dag.{name}", "no value with run, the only task", value)
        with DAG(dag_id, default_args={**DEFAULT_ARGS, **(default_args or {})}, **args) as dag:
            BroadwayRunOperator(task_id="run", pipeline=pipeline, staging=staging, **run)
        _check_lease(pipeline, dag, "run", run)
        return dag
    with DAG(dag_id, **args) as dag:
        make_task_group(
            pipeline,
            process=process,
            batch=batch,
            spark=spark,
            ack=ack,
            default_args=default_args,
            staging=staging,
        )
    return dag


def _backlog_asset(
    pipeline: Pipeline, dag_id: str, args: Mapping[str, Any], staging: str | None
) -> Asset:
    """Returns the asset whose events start the Dag, with the trigger that watches the queue."""
    bounds: Backlog = args["schedule"]
    from airflow_broadway.triggers.backlog import BroadwayBacklogTrigger

    trigger = BroadwayBacklogTrigger(
        pipeline,
        dag_id=dag_id,
        min_messages=bounds.min_messages,
        max_age=bounds.max_age,
        poke_interval=bounds.poke_interval,
        max_runs=args["max_active_runs"],
        staging=staging,
    )
    return Asset(
        name=f"{dag_id}.{pipeline.name}.backlog",
        uri=f"x-broadway://{dag_id}/{pipeline.name}/backlog",
        watchers=[AssetWatcher(name="backlog", trigger=trigger)],
    )
