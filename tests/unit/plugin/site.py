"""The plugin's app, mounted as Airflow's API server mounts it, with Airflow's own auth manager."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from airflow.api_fastapi.app import create_auth_manager, purge_cached_app
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.api_fastapi.auth.middlewares.refresh_token import JWTRefreshMiddleware
from fastapi import FastAPI
from fastapi.testclient import TestClient

from airflow_broadway.plugin.access import CSRF_FIELD
from airflow_broadway.plugin.app import create_app
from airflow_broadway.plugin.broadway_plugin import PREFIX


class Browser(TestClient):
    """A user's browser: it keeps cookies, and says where a request comes from."""

    def form(self, page: str, to: str, **fields: str | list[str]) -> Any:
        """Send a form as the page at ``page`` has it, with its token."""
        text = self.get(page).text
        token = text.split(f'name="{CSRF_FIELD}" value="', 1)[1].split('"', 1)[0]
        return self.post(
            to, data={CSRF_FIELD: token, **fields}, headers={"sec-fetch-site": "same-origin"}
        )


class Site:
    """An API server with the pages of the plugin; ``staging`` is its staging root."""

    def __init__(self, staging: Path, app: FastAPI) -> None:
        self.staging = staging
        self.app = app

    def browser(self, role: str | None = None, **options: Any) -> Browser:
        """A browser of a user with a role of the simple auth manager; ``None``: no login."""
        browser = Browser(self.app, base_url="http://airflow.test", **options)
        if role is not None:
            user = SimpleAuthManagerUser(username=role.lower(), role=role)
            browser.cookies.set("_token", create_auth_manager().generate_jwt(user))
        return browser


@contextmanager
def mounted(staging: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The app at its prefix, behind the middleware that reads Airflow's cookie."""
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", staging.as_uri())
    monkeypatch.setenv("AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS", "True")
    purge_cached_app()
    manager = create_auth_manager()
    assert isinstance(manager, SimpleAuthManager)
    manager.init()
    app = FastAPI()
    app.mount(PREFIX, create_app())
    app.add_middleware(JWTRefreshMiddleware)
    try:
        yield Site(staging, app)
    finally:
        purge_cached_app()
