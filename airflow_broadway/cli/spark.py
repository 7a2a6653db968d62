"""The Spark half of a replay: what the operator does, outside any Airflow task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.providers.common.compat.sdk import AirflowException

from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.version import __version__
from airflow_broadway.operators.spark_submit import BroadwaySparkSubmitOperator
from airflow_broadway.staging.run_folder import StagedRun

#: The name of a replay's only work file.
NAME = "replay"
#: Characters of what Spark ended with.
MAX_ERROR = 600


def run_on_spark(
    target: StagedRun,
    ref: dict[str, Any],
    info: RunInfo,
    plans: Sequence[BatchPlan],
    settings: dict[str, Any],
) -> str:
    """Run plans in one Spark application; returns what it ended with, if that was an error.

    :param target: The replay's folder.
    :param settings: Arguments for :class:`SparkSubmitOperator`.
    :raises BroadwayError: If Spark cannot be started: one sentence on what is missing.
    """
    operator = BroadwaySparkSubmitOperator(
        task_id=NAME,
        name=f"{info.dag_id}.{NAME}",
        pipeline=ref,
        batches=[],
        durable=False,
        **settings,
    )
    path = paths.work(NAME, 1)
    work = Work(
        name=NAME,
        try_number=1,
        pipeline=ref,
        run=info.to_json(),
        plans=[plan.path for plan in plans],
        package_version=__version__,
    )
    target.files.create(path, work.dumps())
    try:
        operator.run_without_task(target.spark_uri(), lambda: (path, work))
    except AirflowException as error:
        return str(error)[:MAX_ERROR]
    except BaseException:  # Ctrl-C, for one: the application is not to outlive this command
        operator.on_kill()
        raise
    return ""
