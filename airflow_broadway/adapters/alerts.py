"""Airflow's notifiers, as what tells of a run's alerts."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk.bases.notifier import BaseNotifier

from airflow_broadway.adapters.parsing import declared
from airflow_broadway.adapters.task import ports_of, task_of
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.alerts import Alerts

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_broadway.core.pipeline import Pipeline
    from airflow_broadway.runs.alerts import Alert, Notify, RunAlerts
    from airflow_broadway.staging.run_folder import StagedRun

__all__ = ["checked_alerts", "run_alerts"]


def checked_alerts(given: Alerts | None, ref: Mapping[str, Any]) -> Alerts:
    """The alerts of a task, checked while the Dag is parsed.

    :raises OptionsError: If they are none, or the broker never knows the age that is asked for.
    """
    alerts = Alerts() if given is None else given
    if not isinstance(alerts, Alerts):
        raise OptionsError("alerts", "Alerts(…)", alerts)
    pipeline = declared(ref) if alerts.backlog_age is not None else None
    if pipeline is None:
        return alerts
    from airflow_broadway.runs.backlog.queues import WatchedQueues

    if not WatchedQueues.of(pipeline).tells_age:
        raise OptionsError(
            "Alerts.backlog_age",
            f"None for {pipeline.producer.kind or type(pipeline.producer).__name__}, whose broker"
            " never tells how long a message has waited",
            alerts.backlog_age,
        )
    return alerts


def run_alerts(alerts: Alerts, context: Context, run: StagedRun, pipeline: Pipeline) -> RunAlerts:
    """What tells of a run's alerts, in the task of a context."""
    from airflow_broadway.runs.alerts import RunAlerts

    notifiers = {
        f"{number}:{_name(each)}": _notify(each, context)
        for number, each in enumerate(alerts.notifiers)
    }
    teller = task_of(context).file_name
    return RunAlerts(run, pipeline, alerts, notifiers, ports=ports_of(context), teller=teller)


def _name(notifier: Any) -> str:
    return str(getattr(notifier, "__name__", type(notifier).__name__))


def _notify(notifier: Callable[[Any], object], context: Context) -> Notify:
    def notify(alert: Alert) -> object:
        given: Any = {**context, "broadway_alert": alert.to_json()}
        # A notifier renders its templates in place: of a copy, for the next alert has other words.
        own = copy.copy(notifier)
        if isinstance(own, BaseNotifier) and type(own).notify is BaseNotifier.notify:
            own.context = given
            return asyncio.run(_awaited(own))
        return own(given)

    return notify


async def _awaited(notifier: BaseNotifier) -> None:
    await notifier
