"""The Spark half of a replay: the operator's own preparation, outside any Airflow task."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from airflow.providers.common.compat.sdk import AirflowException

from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.version import __version__
from airflow_broadway.operators.spark_submit import BroadwaySparkSubmitOperator
from airflow_broadway.staging.run_folder import StagedRun

__all__ = ["run_on_spark"]

#: The name of a replay's only work file.
NAME = "replay"
#: Characters of what Spark ended with.
MAX_ERROR = 600


def run_on_spark(
    shadow: StagedRun,
    ref: dict[str, Any],
    info: RunInfo,
    plans: Sequence[BatchPlan],
    settings: dict[str, Any],
) -> str:
    """Run plans in one Spark application; returns what it ended with, if that was an error.

    :param settings: Arguments for :class:`SparkSubmitOperator`.
    :raises BroadwayError: If Spark cannot be started: one sentence on what is missing.
    """
    operator = _ReplayOperator(
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
    shadow.files.create(path, work.dumps())
    try:
        operator.submit_work(shadow.spark_uri(), path, work)
    except AirflowException as error:
        return str(error)[:MAX_ERROR]
    except BaseException:  # Ctrl-C, for one: the application is not to outlive this command
        operator.on_kill()
        raise
    return ""


class _ReplayOperator(BroadwaySparkSubmitOperator):
    """Starts an application as the operator does; there is no task, and no lease to keep."""

    def submit_work(self, uri: str, path: str, work: Work) -> None:
        """Run what a work file asks for, until it has ended.

        :raises AirflowException: If it ended badly.
        """
        with tempfile.TemporaryDirectory(prefix="airflow-broadway-") as folder:
            self._prepare(uri, Path(folder))
            hook = self._hook = self._make_hook(uri, lambda: (path, work))
            if hook._should_track_driver_status or hook._should_track_driver_via_k8s_api():
                # Not durable, so it asks nothing of its context.
                self.execute_resumable(cast("Any", {}))
                return
            hook.submit(self.application)
