"""The app that Airflow's API server mounts at ``/broadway``: routes, static files, headers.

Error pages have one sentence and no stack trace.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from airflow.api_fastapi.app import get_auth_manager
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from airflow_broadway.core.errors import BroadwayError, RequestRefused
from airflow_broadway.plugin.access import GUARDS, remember_browser
from airflow_broadway.plugin.pages import dead_letters, message, pipelines, run
from airflow_broadway.plugin.render import STATIC, page, sentence, version

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

#: Headers of every response: only our own scripts, styles and frames.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'self';"
    " base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def create_app() -> FastAPI:
    """Creates the app; static files are public, all else needs a login."""
    app = FastAPI(title="Broadway", dependencies=GUARDS, openapi_url=None, redirect_slashes=False)
    for module in (message, pipelines, run, dead_letters):
        app.include_router(module.router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.middleware("http")(_with_headers)
    app.exception_handler(HTTPException)(_on_http)
    app.exception_handler(RequestValidationError)(_on_invalid)
    app.exception_handler(BroadwayError)(_on_broadway)
    return app


async def _with_headers(
    request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    # Read first: mounted apps change it.
    root = request.scope.get("root_path", "")
    try:
        response = await call_next(request)
    except Exception as error:
        log.error("%s failed", request.url.path, exc_info=error)
        text = "The log of the API server says what happened."
        response = _trouble(request, HTTPStatus.INTERNAL_SERVER_ERROR, text)
    response.headers.update(_HEADERS)
    name, tag = request.url.path.removeprefix(f"{root}/static/"), request.query_params.get("v")
    # Servers of other releases have different files under these names.
    if response.status_code == HTTPStatus.OK and name != request.url.path and tag == version(name):
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
    remember_browser(request, response)
    return response


# -- errors ----------------------------------------------------------------------------------------


def _trouble(request: Request, status: int, message: str) -> HTMLResponse:
    """Renders the page of an error."""
    login = None
    if status == HTTPStatus.UNAUTHORIZED:
        login = get_auth_manager().get_url_login(next_url=str(request.url))
    title = _TITLES.get(status, "This went wrong")
    return page(request, "trouble.html", status=status, title=title, sentence=message, login=login)


async def _on_http(request: Request, error: HTTPException) -> HTMLResponse:
    return _trouble(request, error.status_code, str(error.detail))


async def _on_invalid(request: Request, error: RequestValidationError) -> HTMLResponse:
    text = "; ".join(f"{detail['loc'][-1]}: {detail['msg']}" for detail in error.errors())
    return _trouble(request, HTTPStatus.UNPROCESSABLE_ENTITY, text)


async def _on_broadway(request: Request, error: BroadwayError) -> HTMLResponse:
    if not isinstance(error, RequestRefused):
        log.warning("%s: %s", request.url.path, error)
        return _trouble(request, HTTPStatus.SERVICE_UNAVAILABLE, sentence(str(error)))
    status = HTTPStatus.NOT_FOUND if request.method == "GET" else HTTPStatus.CONFLICT
    return _trouble(request, status, str(error))
