"""Authorization of every request by Airflow's auth manager, Airflow's audit log, protection against
CSRF.

The whole app has :data:`GUARDS`: every request needs a login (401), and every request that changes
something a CSRF token (403).  A route of a Dag declares the permissions that it needs::

    @router.get("/dags/{dag_id}/runs/{run_id}", dependencies=[READS_RUNS])
    @router.post("/dags/{dag_id}/pipelines/{pipeline}/…", dependencies=[EDITS_RUNS])

Reading needs the permission to read the Dag's runs.  Actions and payloads need the permission to
edit them.  Moving dead letters also needs the permission to trigger a run, because a run moves
them.  :data:`MayEdit` is for pages that show more to editors.

**CSRF.**  A form carries a token in the field :data:`CSRF_FIELD` (``csrf`` in every template): a
timestamp signed with the API server's secret for the user and a random cookie of this browser.
Airflow's own cookie is unsuitable: auth managers replace it while a page is open.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag
from airflow.configuration import conf
from airflow.models.dag import DagModel
from airflow.models.log import Log
from airflow.utils.session import create_session
from fastapi import Depends, HTTPException, Request, status
from itsdangerous import TimestampSigner
from sqlalchemy.exc import SQLAlchemyError

from airflow_broadway.adapters.versions import teams_of
from airflow_broadway.plugin.fair_semaphore import USER

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
    from fastapi import Response

log = logging.getLogger(__name__)

#: The dependency of a route that reads the runs of the Dag in its path.
READS_RUNS: Final = Depends(requires_access_dag("GET", DagAccessEntity.RUN))
#: The dependency of a route that acts on the Dag in its path, or shows payloads of it.
EDITS_RUNS: Final = Depends(requires_access_dag("PUT", DagAccessEntity.RUN))
#: The dependency of a route that begins a run of the Dag in its path.
TRIGGERS_RUNS: Final = Depends(requires_access_dag("POST", DagAccessEntity.RUN))
#: Replaces errors that name hosts, files and queues for users without edit permission.
WITHHELD: Final = "those who may edit the runs of this Dag see why"

#: The field of a form that carries the token.
CSRF_FIELD: Final = "csrf"
#: The header of a request that carries the token.
CSRF_HEADER: Final = "x-broadway-csrf"
#: The cookie that identifies a browser; it grants no access.
BROWSER_COOKIE: Final = "broadway_browser"
#: Seconds for which a token is valid.
TOKEN_SECONDS: Final = 12 * 3600
#: Methods without side effects.
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def may_edit(dag_id: str, user: GetUserDep) -> bool:
    """Returns whether the user may edit a Dag's runs, and so see payloads."""
    details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
    return get_auth_manager().is_authorized_dag(
        method="PUT", access_entity=DagAccessEntity.RUN, details=details, user=user
    )


def readable_dags(user: BaseUser, dag_ids: Collection[str]) -> set[str]:
    """Returns the Dags whose runs the user may read."""
    manager = get_auth_manager()
    teams = teams_of(dag_ids)
    return {
        dag_id
        for dag_id in manager.get_authorized_dag_ids(user=user) & set(dag_ids)
        if manager.is_authorized_dag(
            method="GET",
            access_entity=DagAccessEntity.RUN,
            details=DagDetails(id=dag_id, team_name=teams.get(dag_id)),
            user=user,
        )
    }


#: A parameter of a route with ``dag_id`` in its path: whether the user may edit its runs.
MayEdit = Annotated[bool, Depends(may_edit)]


# -- audit -----------------------------------------------------------------------------------------


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


# -- CSRF ------------------------------------------------------------------------------------------


def csrf_of(request: Request) -> str:
    """Returns the token for the forms of a page; empty without a login."""
    user = getattr(request.state, "broadway_user", None)
    if user is None:
        return ""
    browser = request.cookies.get(BROWSER_COOKIE) or secrets.token_urlsafe(24)
    request.state.broadway_browser = browser
    return make_token(user, browser)


def make_token(user: BaseUser, browser: str) -> str:
    """Returns the token of a user in a browser, valid for :data:`TOKEN_SECONDS`."""
    return _signer(user, browser).sign(CSRF_FIELD).decode()


def _signer(user: BaseUser, browser: str) -> TimestampSigner:
    # JSON, so that no two pairs give the same text.
    salt = json.dumps(["broadway csrf", str(user.get_id()), browser])
    return TimestampSigner(conf.get("api", "secret_key"), salt=salt, digest_method=hashlib.sha256)


def remember_browser(request: Request, response: Response) -> None:
    """Sets the browser's cookie if the response contains its first token."""
    browser = getattr(request.state, "broadway_browser", None)
    if browser is None or request.cookies.get(BROWSER_COOKIE):
        return
    response.set_cookie(
        BROWSER_COOKIE,
        browser,
        path=request.scope.get("root_path") or "/",
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


async def _guard(request: Request, user: GetUserDep) -> None:
    """Stores the user for the page that is rendered, and rejects invalid requests.

    :raises HTTPException: 422 for a URL with a NUL character, on which databases fail; 403 for a
        cross-site request.
    """
    request.state.broadway_user = user
    USER.set(str(user.get_id()))
    values = (*request.path_params.values(), *request.query_params.values())
    if any("\0" in str(value) for value in values):
        raise HTTPException(
            status.HTTP_422_UNPROCESSABLE_CONTENT, "Text must not contain NUL characters."
        )
    if request.method in _SAFE:
        return
    if _is_foreign(request):
        raise HTTPException(status.HTTP_403_FORBIDDEN, "The request comes from another site.")
    header = request.headers.get(CSRF_HEADER)
    token = header if header is not None else (await request.form()).get(CSRF_FIELD)
    browser = request.cookies.get(BROWSER_COOKIE)
    if not (
        isinstance(token, str)
        and browser
        and _signer(user, browser).validate(token, max_age=TOKEN_SECONDS)
    ):
        raise HTTPException(status.HTTP_403_FORBIDDEN, "The form has expired: reload the page.")


def _is_foreign(request: Request) -> bool:
    """Returns whether the request comes from another site, by the browser's headers."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != request.headers.get("host")


#: Dependencies of every route.
GUARDS: Final[list[Any]] = [Depends(_guard)]
