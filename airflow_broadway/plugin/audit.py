"""Entries in Airflow's audit log for payload access and dead-letter moves."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.models.log import Log
from airflow.utils.session import create_session
from fastapi import HTTPException
from sqlalchemy.exc import SQLAlchemyError

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.models.base_user import BaseUser

log = logging.getLogger(__name__)


def note(
    user: BaseUser, dag_id: str, event: str, extra: Mapping[str, Any], *, run_id: str | None = None
) -> None:
    """Writes an entry, before the action is carried out.

    :raises HTTPException: 503, if it cannot be written; the action must then not be carried out.
    """
    name = str(user.get_name())
    try:
        with create_session() as session:
            session.add(
                Log(
                    event=event,
                    dag_id=dag_id,
                    run_id=run_id,
                    owner=name,
                    owner_display_name=name,
                    extra=json.dumps(extra),
                )
            )
    except SQLAlchemyError:
        log.exception("Airflow's audit log cannot be written")
        raise HTTPException(
            503, "Airflow's audit log cannot be written, so nothing was done."
        ) from None
