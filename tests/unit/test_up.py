"""``make up``: how it ends, without an Airflow."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts import up
from scripts.local_airflow import LocalAirflowError


class Fake:
    """Stands for a local Airflow; ``at_health`` is what happens while it is waited for."""

    at_health: Any = None
    made: Fake

    def __init__(self, env: dict[str, str], log_dir: Path) -> None:
        Fake.made = self
        self.env = {"AIRFLOW__CORE__DAGS_FOLDER": "dags", **env}
        self.log_dir, self.url, self.token = log_dir, "http://127.0.0.1:1", "token"
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def wait_healthy(self, seconds: float) -> None:
        self.calls.append("wait")
        if type(self).at_health is not None:
            type(self).at_health()

    def check_alive(self) -> None:
        self.calls.append("alive")
        signal.raise_signal(signal.SIGINT)

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture(autouse=True)
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(up, "ROOT", tmp_path)
    monkeypatch.setattr(up, "FLIGHTS_QUEUE", tmp_path / "demo" / "queue.db")
    monkeypatch.setattr(up, "LocalAirflow", Fake)
    monkeypatch.setattr(up, "end_leftovers", lambda home: None)
    monkeypatch.setattr("scripts.up.time.sleep", lambda seconds: None)
    monkeypatch.setattr(Fake, "at_health", None)
    monkeypatch.delenv("PORT", raising=False)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_it_runs_until_it_is_interrupted_and_stops_airflow(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert up.main() == 0
    assert Fake.made.calls == ["start", "wait", "alive", "stop"]
    told = capsys.readouterr().out
    assert SqliteQueue(tmp_path / "demo" / "queue.db", "flights").names() == ["flights"]
    assert "http://127.0.0.1:1/dags" in told
    assert told.index("Airflow is healthy") < told.index("Stopping") < told.index("Stopped")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_starts_stops_it_too(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(Fake, "at_health", staticmethod(lambda: signal.raise_signal(number)))
    assert up.main() == 0
    assert Fake.made.calls == ["start", "wait", "stop"]


def test_an_airflow_that_does_not_start_is_told_stopped_and_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise LocalAirflowError("the scheduler ended with 1")

    monkeypatch.setattr(Fake, "at_health", staticmethod(fails))
    assert up.main() == 1
    assert Fake.made.calls == ["start", "wait", "stop"]
    told = capsys.readouterr()
    assert "the scheduler ended with 1" in told.err
    assert "Stopped" not in told.out


def test_a_second_signal_kills_what_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []
    monkeypatch.setattr(up, "kill_by_token", killed.append)
    monkeypatch.setattr("scripts.up.os._exit", lambda code: killed.append(f"exit {code}"))
    monkeypatch.setattr(Fake, "stop", lambda self: signal.raise_signal(signal.SIGINT))
    assert up.main() == 0
    assert killed == ["token", "exit 1"]


def test_a_port_that_is_no_number_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PORT", "http")
    assert up.main() == 2
    assert "PORT=http is not a number" in capsys.readouterr().err
