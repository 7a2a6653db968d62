"""Links of a task in Airflow's UI: to the run's page, its report, Spark, the broker's console.

Airflow 3 evaluates a link in the worker, when the task has ended, and stores the URL as an XCom;
the UI reads only that.  So the links are attributes of the operators, and the plugin registers
none.  A link that only the execution knows is recorded while it runs: :func:`note_link`.
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
    """Returns the URL if it is safe to link to (http or https, no password); else ``None``."""
    text = str(value or "").strip()
    try:
        parts = urlsplit(text)
    except ValueError:
        return None
    # A password would be visible to everyone who sees the link.
    safe = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
    return text if safe else None


class RunPageLink(BaseOperatorLink):
    """The page of the run's messages."""

    name = "Broadway"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        base = conf.get("api", "base_url", fallback="") or ""
        ids = quote(ti_key.dag_id, safe=""), quote(ti_key.run_id, safe="")
        # Without a host it is a path on the UI's own host.
        return f"{base.rstrip('/')}/broadway/dags/{ids[0]}/runs/{ids[1]}"


class ReportLink(RunPageLink):
    """The run's report, once it exists."""

    name = "Report"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return f"{super().get_link(operator, ti_key=ti_key)}/report"


class _RecordedLink(BaseOperatorLink):
    """A URL that only the execution knows; no link if none was recorded."""

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        recorded = operator.__dict__.get("_recorded_links", {})
        return recorded.get(self.xcom_key)  # type: ignore[no-any-return] # None: no link


class ConsoleLink(_RecordedLink):
    """The queue in its broker's console."""

    name = "Broker's console"


class SparkLink(_RecordedLink):
    """Spark's UI while the application runs, and its page in the history server afterwards."""

    name = "Spark"


#: The links of every task, of tasks that use the broker, and of tasks that start Spark.
ALL_TASKS: Final[tuple[BaseOperatorLink, ...]] = (RunPageLink(), ReportLink())
AT_BROKER: Final[tuple[BaseOperatorLink, ...]] = (*ALL_TASKS, ConsoleLink())
ON_SPARK: Final[tuple[BaseOperatorLink, ...]] = (*ALL_TASKS, SparkLink())


def note_console(operator: Any, pipeline: Pipeline, ports: Ports) -> None:
    """Records the URL of the queue in its broker's console, if known; makes no request."""
    try:
        url = pipeline.producer.console(producer_env(pipeline, ports))
    except BroadwayError:
        return  # the task itself reports the error
    _record_link(operator, ConsoleLink(), web_address(url))


def note_spark(operator: Any, context: Context, application_id: str, ui: str) -> None:
    """Records the URLs of a Spark application: its UI immediately, the history server for later."""
    running = web_address(ui)
    if running is not None:
        context["ti"].xcom_push(key=SparkLink().xcom_key, value=running)
    history = web_address(conf.get("broadway", "spark_history", fallback=""))
    if history is not None:
        page = f"{history.rstrip('/')}/history/{quote(application_id, safe='')}/"
        _record_link(operator, SparkLink(), page)


def _record_link(operator: Any, link: BaseOperatorLink, address: str | None) -> None:
    operator.__dict__.setdefault("_recorded_links", {})[link.xcom_key] = address
