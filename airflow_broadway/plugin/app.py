"""The app that Airflow's API server mounts at ``/broadway``: routes, static files, headers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request, Response
from starlette.staticfiles import StaticFiles

from airflow_broadway.plugin.access import GUARDS, remember_browser
from airflow_broadway.plugin.pages import dead_letters, message, pipelines, report, run
from airflow_broadway.plugin.render import STATIC, version
from airflow_broadway.plugin.troubles import add_troubles, broken

#: Each page's module; its ``router`` has the routes.
_PAGES: Final = (message, pipelines, report, run, dead_letters)

#: Security headers: only our own scripts, styles and frames.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'self';"
    " base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}


def create_app() -> FastAPI:
    """Creates the app; static files are public, all else needs a login."""
    app = FastAPI(
        title="Broadway",
        dependencies=GUARDS,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # No redirects.
        redirect_slashes=False,
    )
    for page in _PAGES:
        app.include_router(page.router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.middleware("http")(_with_headers)
    add_troubles(app)
    return app


async def _with_headers(
    request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    # Read first: mounted apps change it.
    root = request.scope.get("root_path", "")
    try:
        response = await call_next(request)
    except Exception as error:
        response = broken(request, error)
    response.headers.update(_HEADERS)
    immutable = response.status_code == HTTPStatus.OK and _is_versioned(request, f"{root}/static/")
    response.headers["Cache-Control"] = (
        "public, max-age=31536000, immutable" if immutable else "no-store"
    )
    remember_browser(request, response)
    return response


def _is_versioned(request: Request, static: str) -> bool:
    """Returns whether the request is for a static file, by its content-addressed URL."""
    path = request.url.path
    # Servers of other releases have different files under these names.
    return path.startswith(static) and request.query_params.get("v") == version(
        path.removeprefix(static)
    )
