"""The name of an Airflow deployment, by which a sweep knows its own runs."""

from __future__ import annotations

import pytest

from airflow_broadway.adapters.host import deployment


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"BROADWAY__DEPLOYMENT": "blue", "API__BASE_URL": "https://a.example.org"}, "blue"),
        ({"API__BASE_URL": "https://a.example.org/team"}, "a.example.org/team"),
        (
            {
                "CORE__EXECUTION_API_SERVER_URL": "http://user:secret@api.blue:8080/execution/",
                "API__BASE_URL": "https://a.example.org",
            },
            "api.blue:8080/execution/",
        ),
        ({"CORE__EXECUTION_API_SERVER_URL": "http://localhost:8080/execution/"}, "worker:/home/a"),
        ({"API__BASE_URL": "http://127.0.0.1:8080"}, "worker:/home/a"),
        ({"API__BASE_URL": "/"}, "worker:/home/a"),
        ({}, "worker:/home/a"),
    ],
)
def test_deployment_is_a_setting_or_the_api_server_address(monkeypatch, settings, name):
    for setting in ("BROADWAY__DEPLOYMENT", "API__BASE_URL", "CORE__EXECUTION_API_SERVER_URL"):
        monkeypatch.delenv(f"AIRFLOW__{setting}", raising=False)
    for setting, value in settings.items():
        monkeypatch.setenv(f"AIRFLOW__{setting}", value)
    monkeypatch.setenv("AIRFLOW_HOME", "/home/a")
    monkeypatch.setattr("socket.gethostname", lambda: "worker")

    assert deployment() == name
