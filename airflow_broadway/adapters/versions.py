"""The differences between releases of Airflow, and of the providers that Airflow's constraints pin.

No other module asks for a version, or tests whether Airflow has a name: what all supported releases
have is imported where it is used, through ``airflow.providers.common.compat.sdk`` where it moved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

import airflow

if airflow.__version__.startswith(("1.", "2.")):
    raise ImportError(
        f"airflow-broadway needs Apache Airflow 3.1 or newer, and this is {airflow.__version__}:"
        " upgrade Airflow (pip install 'apache-airflow>=3.1'), or uninstall airflow-broadway"
    )


def tracks_driver(hook: Any) -> bool:
    """Returns whether the Spark provider polls a cluster's API for the end of the application.

    :param hook: A ``SparkSubmitHook``; those before release 6.2 never do.
    """
    names = ("_should_track_driver_via_k8s_api", "_should_track_yarn_application_via_rm_api")
    return any(getattr(hook, name, bool)() for name in names)


def is_durable(operator: Any) -> bool:
    """Returns whether a retry of a ``SparkSubmitOperator`` may resume its application.

    Resuming needs the Spark provider 6.3, and the task state store of Airflow 3.3.
    """
    return bool(getattr(operator, "durable", False))


def parse_folder(path: str) -> Any:
    """Returns the ``DagBag`` of a folder; Airflow 3.1 has the class in another module."""
    try:
        module = import_module("airflow.dag_processing.dagbag")
    except ImportError:
        module = import_module("airflow.models.dagbag")
    return module.DagBag(path)


def teams_of(dag_ids: Collection[str]) -> Mapping[str, str | None]:
    """Returns Dag id → name of its team, from Airflow's database; Airflow 3.1 asks for each."""
    from airflow.models.dag import DagModel

    of_all = getattr(DagModel, "get_dag_id_to_team_name_mapping", None)
    if of_all is None:
        return {dag_id: DagModel.get_team_name(dag_id) for dag_id in dag_ids}
    teams: Mapping[str, str | None] = of_all(list(dag_ids))
    return teams
