"""Links from a task in Airflow's UI: to the run's page, its report, Spark, the broker's console.

Airflow 3 asks a link for its address in the worker, when the task has ended, and stores it as an
XCom; the UI reads no more than that.  So the links are attributes of the operators, and the plugin
names none.  What only an execution knows its task notes while it works: :func:`note_link`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from airflow.providers.common.compat.sdk import conf
from airflow.sdk import BaseOperatorLink

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.runs.ports import producer_env

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_broadway.core.pipeline import Pipeline
    from airflow_broadway.runs.ports import Ports


def web_address(value: object) -> str | None:
    """An address that a browser may be led to: one of http(s); ``None`` else."""
    text = str(value or "").strip()
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    # One with a password would show it to whoever sees the link.
    safe = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
    return text if safe else None


def _run_page(ti_key: Any) -> str:
    base = conf.get("api", "base_url", fallback="") or ""
    ids = quote(ti_key.dag_id, safe=""), quote(ti_key.run_id, safe="")
    # Without a host it is a path of the UI's own host.
    return f"{base.rstrip('/')}/broadway/dags/{ids[0]}/runs/{ids[1]}"


class RunPageLink(BaseOperatorLink):
    """What became of the run's messages."""

    name = "Broadway"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return _run_page(ti_key)


class ReportLink(BaseOperatorLink):
    """The run's report, once there is one."""

    name = "Report"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return f"{_run_page(ti_key)}/report"


class _NotedLink(BaseOperatorLink):
    """An address that only the execution knows; none if nothing was noted."""

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        noted = operator.__dict__.get("_noted_links", {})
        return noted.get(self.xcom_key)  # type: ignore[no-any-return] # None: no link


class ConsoleLink(_NotedLink):
    """The queue in its broker's own console."""

    name = "Broker's console"


class SparkLink(_NotedLink):
    """Spark's UI while the application runs, and its history server's page of it afterwards."""

    name = "Spark"


#: The links of every task, of those that deal with the broker, and of those that start Spark.
ALL_TASKS: Final[tuple[BaseOperatorLink, ...]] = (RunPageLink(), ReportLink())
AT_BROKER: Final[tuple[BaseOperatorLink, ...]] = (*ALL_TASKS, ConsoleLink())
ON_SPARK: Final[tuple[BaseOperatorLink, ...]] = (*ALL_TASKS, SparkLink())


def note_console(operator: Any, pipeline: Pipeline, ports: Ports) -> None:
    """Note where the broker's own console shows the queue, if that is known; asks no broker."""
    try:
        found = pipeline.producer.console(producer_env(pipeline, ports))
    except BroadwayError:
        return  # the task itself says what is wrong
    address = web_address(found)
    if address is not None:
        _note(operator, ConsoleLink(), address)


def note_spark(operator: Any, context: Context, application_id: str, ui: str) -> None:
    """Note where Spark shows an application: its UI at once, the history server for later."""
    running = web_address(ui)
    if running is not None:
        context["ti"].xcom_push(key=SparkLink().xcom_key, value=running)
    history = web_address(conf.get("broadway", "spark_history", fallback=""))
    if history is not None:
        kept = f"{history.rstrip('/')}/history/{quote(application_id, safe='')}/"
        _note(operator, SparkLink(), kept)


def _note(operator: Any, link: BaseOperatorLink, address: str) -> None:
    operator.__dict__.setdefault("_noted_links", {})[link.xcom_key] = address
