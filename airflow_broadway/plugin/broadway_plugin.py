"""The Airflow plugin, registered by the entry point ``airflow.plugins``.

Airflow discovers provider plugins only with ``[core] lazy_load_providers`` off, entry points
always.  Every Airflow process imports this module, so the pages' modules are imported lazily, by
the API server only.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from airflow.plugins_manager import AirflowPlugin

#: The path at which the API server mounts the pages.
PREFIX = "/broadway"


class BroadwayPlugin(AirflowPlugin):
    """The pages, and their places in Airflow's UI.

    A view's ``href`` is relative, as Airflow's UI may live below a path: ``[api] base_url``.
    Airflow inserts the ids with ``encodeURIComponent``.
    """

    name = "broadway"
    external_views: list[Any] = [  # noqa: RUF012 - as Airflow declares it
        {
            "name": "Broadway",
            "href": "broadway/",
            "destination": "nav",
            "category": "browse",
            "url_route": "broadway",
        },
        {
            "name": "Broadway",
            "href": "broadway/dags/{DAG_ID}/runs/{RUN_ID}",
            "destination": "dag_run",
            "url_route": "broadway-run",
        },
    ]

    @cached_property
    def fastapi_apps(self) -> list[Any]:  # type: ignore[override]
        from airflow_broadway.plugin.app import create_app

        return [{"app": create_app(), "url_prefix": PREFIX, "name": "Broadway"}]
