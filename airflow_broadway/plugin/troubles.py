"""What goes wrong, as a page that says so in one sentence.  Never a stack trace."""

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

#: What a status means to people.
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
    """Have an app answer each error with a page."""
    app.exception_handler(HTTPException)(_on_http)
    app.exception_handler(RequestValidationError)(_on_invalid)
    app.exception_handler(BroadwayError)(_on_broadway)


def trouble(request: Request, status: int, said: str) -> HTMLResponse:
    """The page of a trouble."""
    login = None
    if status == HTTPStatus.UNAUTHORIZED:
        login = get_auth_manager().get_url_login(next_url=str(request.url))
    title = _TITLES.get(status, "This went wrong")
    return page(request, "trouble.html", status=status, title=title, sentence=said, login=login)


async def _on_http(request: Request, error: HTTPException) -> HTMLResponse:
    return trouble(request, error.status_code, str(error.detail))


async def _on_invalid(request: Request, error: RequestValidationError) -> HTMLResponse:
    said = "; ".join(f"{each['loc'][-1]}: {each['msg']}" for each in error.errors())
    return trouble(request, HTTPStatus.UNPROCESSABLE_ENTITY, said)


async def _on_broadway(request: Request, error: BroadwayError) -> HTMLResponse:
    if not isinstance(error, RequestRefused):
        log.warning("%s: %s", request.url.path, error)
        return trouble(request, HTTPStatus.SERVICE_UNAVAILABLE, sentence(str(error)))
    found = HTTPStatus.NOT_FOUND if request.method == "GET" else HTTPStatus.CONFLICT
    return trouble(request, found, str(error))


def broken(request: Request, error: Exception) -> HTMLResponse:
    """The page of an error that nobody foresaw: what it says stands in the log alone."""
    log.error("%s failed", request.url.path, exc_info=error)
    return trouble(
        request, HTTPStatus.INTERNAL_SERVER_ERROR, "The log of the API server says what happened."
    )
