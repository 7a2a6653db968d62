"""Airflow's simple auth manager, with a DAG that not everyone may see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.models.resource_details import DagDetails
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

#: The DAG that only the administrator may see.
SECRET = "secret"


class PerDag(SimpleAuthManager):
    """As large installations have it: rights differ from DAG to DAG."""

    def is_authorized_dag(
        self, *, user: SimpleAuthManagerUser, details: DagDetails | None = None, **others: Any
    ) -> bool:
        if details is not None and details.id == SECRET and user.username != "admin":
            return False
        return super().is_authorized_dag(user=user, details=details, **others)
