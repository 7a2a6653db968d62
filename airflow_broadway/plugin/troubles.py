"""Error pages: one sentence, never a stack trace."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from airflow.api_fastapi.app import get_auth_manager
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from airflow_broadway.core.errors import BroadwayError, RequestRefused
from airflow_broadway.plugin.render import page, sentence

if TYPE_CHECKING:
    from fastapi import FastAPI
    from fastapi.responses import HTMLResponse

log = logging.getLogger(__name__)

#: HTTP status → title.
_TITLES: Final = {
    401: "You are not logged in",
    403: "You may not do this",
    404: "There is nothing here",
    409: "This cannot be done",
    422: "The address is not understood",
    500: "Something is broken here",
    503: "This cannot be done now",
}


def add_troubles(app: FastAPI) -> None:
    """Registers the handlers that answer errors with a page."""
    app.exception_handler(HTTPException)(_on_http)
    app.exception_handler(RequestValidationError)(_on_invalid)
    app.exception_handler(BroadwayError)(_on_broadway)


def trouble(request: Request, status: int, message: str) -> HTMLResponse:
    """Renders the page of an error."""
    login = None
    if status == HTTPStatus.UNAUTHORIZED:
        login = get_auth_manager().get_url_login(next_url=str(request.url))
    title = _TITLES.get(status, "This went wrong")
    return page(request, "trouble.html", status=status, title=title, sentence=message, login=login)


async def _on_http(request: Request, error: HTTPException) -> HTMLResponse:
    return trouble(request, error.status_code, str(error.detail))


async def _on_invalid(request: Request, error: RequestValidationError) -> HTMLResponse:
    text = "; ".join(f"{detail['loc'][-1]}: {detail['msg']}" for detail in error.errors())
    return trouble(request, HTTPStatus.UNPROCESSABLE_ENTITY, text)


async def _on_broadway(request: Request, error: BroadwayError) -> HTMLResponse:
    if not isinstance(error, RequestRefused):
        log.warning("%s: %s", request.url.path, error)
        return trouble(request, HTTPStatus.SERVICE_UNAVAILABLE, sentence(str(error)))
    status = HTTPStatus.NOT_FOUND if request.method == "GET" else HTTPStatus.CONFLICT
    return trouble(request, status, str(error))


def broken(request: Request, error: Exception) -> HTMLResponse:
    """Renders the page of an unexpected error; its text is only logged."""
    log.error("%s failed", request.url.path, exc_info=error)
    return trouble(
        request, HTTPStatus.INTERNAL_SERVER_ERROR, "The log of the API server says what happened."
    )
