"""Airflow's audit log: who saw a payload, and who had dead letters moved."""

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
    user: BaseUser, dag_id: str, event: str, about: Mapping[str, Any], *, run_id: str | None = None
) -> None:
    """Write an entry, before what it tells of is done.

    :raises HTTPException: 503, if it cannot be written: then nothing may be done.
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
                    extra=json.dumps(about),
                )
            )
    except SQLAlchemyError:
        log.exception("Airflow's audit log cannot be written")
        raise HTTPException(
            503, "Airflow's audit log cannot be written, so nothing was done."
        ) from None
