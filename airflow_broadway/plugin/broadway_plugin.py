"""The plugin as Airflow finds it, by the entry point ``airflow.plugins``.

Provider plugins are found by Airflow only where ``[core] lazy_load_providers`` is off; an entry
point is found always.  Every process of Airflow loads this module, so what the pages need is
loaded where the API server asks for them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from airflow.plugins_manager import AirflowPlugin

#: Where the API server mounts the pages.
PREFIX = "/broadway"


class BroadwayPlugin(AirflowPlugin):
    """The pages, and where Airflow's UI shows them.

    A view's ``href`` is relative, as Airflow's UI may live below a path: ``[api] base_url``.
    Airflow puts the ids in with ``encodeURIComponent``.
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
