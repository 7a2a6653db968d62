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

#: What a browser may do with a page: run our script, and show our style, in our frame.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; form-action 'self'; frame-ancestors 'self';"
    " base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}


def create_app() -> FastAPI:
    """The pages; static files are for everyone, all else for who is logged in."""
    app = FastAPI(
        title="Broadway",
        dependencies=GUARDS,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # No address sends a browser elsewhere.
        redirect_slashes=False,
    )
    for each in _PAGES:
        app.include_router(each.router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.middleware("http")(_with_headers)
    add_troubles(app)
    return app


async def _with_headers(
    request: Request, go_on: Callable[[Request], Awaitable[Response]]
) -> Response:
    # What is mounted below changes it.
    root = request.scope.get("root_path", "")
    try:
        response = await go_on(request)
    except Exception as error:
        response = broken(request, error)
    response.headers.update(_HEADERS)
    kept = response.status_code == HTTPStatus.OK and _is_kept(request, f"{root}/static/")
    response.headers["Cache-Control"] = (
        "public, max-age=31536000, immutable" if kept else "no-store"
    )
    remember_browser(request, response)
    return response


def _is_kept(request: Request, static: str) -> bool:
    """Whether it is for a static file, by the address that changes with what is in it."""
    path = request.url.path
    # Another release's server, beside this one or before it, has other files of these names.
    return path.startswith(static) and request.query_params.get("v") == version(
        path.removeprefix(static)
    )
