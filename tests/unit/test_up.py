"""``make up``: how it ends, without an Airflow."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts import up
from scripts.local_airflow import LocalAirflowError


class Fake:
    """A local Airflow without processes; ``at_health`` is called while it starts."""

    at_health: Any = None
    last: Fake

    def __init__(self, env: dict[str, str], log_dir: Path) -> None:
        Fake.last = self
        self.env = {"AIRFLOW__CORE__DAGS_FOLDER": "dags", **env}
        self.log_dir, self.url, self.token = log_dir, "http://127.0.0.1:1", "token"
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def wait_healthy(self, seconds: float) -> None:
        self.calls.append("wait")
        if Fake.at_health is not None:
            Fake.at_health()

    def check_alive(self) -> None:
        self.calls.append("alive")
        signal.raise_signal(signal.SIGINT)

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture(autouse=True)
def stage(monkeypatch, tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(up, "ROOT", tmp_path)
    monkeypatch.setattr(up, "FLIGHTS_QUEUE", tmp_path / "demo" / "queue.db")
    monkeypatch.setattr(up, "LocalAirflow", Fake)
    monkeypatch.setattr(up, "end_leftovers", lambda home: None)
    monkeypatch.setattr("scripts.up.time.sleep", lambda seconds: None)
    monkeypatch.setattr(Fake, "at_health", None)
    monkeypatch.delenv("PORT", raising=False)
    monkeypatch.setattr("sys.argv", ["up"])
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_interrupt_stops_airflow(capsys, tmp_path):
    assert up.main() == 0
    assert Fake.last.calls == ["start", "wait", "alive", "stop"]
    output = capsys.readouterr().out
    assert SqliteQueue(tmp_path / "demo" / "queue.db", "flights").names() == ["flights"]
    assert "http://127.0.0.1:1/dags" in output
    assert output.index("Airflow is healthy") < output.index("Stopping") < output.index("Stopped")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_during_the_start_stops_airflow(monkeypatch, number):
    monkeypatch.setattr(Fake, "at_health", staticmethod(lambda: signal.raise_signal(number)))
    assert up.main() == 0
    assert Fake.last.calls == ["start", "wait", "stop"]


def test_failed_start_is_printed_and_stopped(monkeypatch, capsys):
    error = LocalAirflowError("the scheduler ended with 1")
    monkeypatch.setattr(Fake, "at_health", mock.Mock(side_effect=error))
    assert up.main() == 1
    assert Fake.last.calls == ["start", "wait", "stop"]
    output = capsys.readouterr()
    assert "the scheduler ended with 1" in output.err
    assert "Stopped" not in output.out


def test_second_signal_kills_the_processes(monkeypatch):
    killed: list[str] = []
    monkeypatch.setattr(up, "kill_by_token", killed.append)
    monkeypatch.setattr("scripts.up.os._exit", lambda code: killed.append(f"exit {code}"))
    monkeypatch.setattr(Fake, "stop", lambda self: signal.raise_signal(signal.SIGINT))
    assert up.main() == 0
    assert killed == ["token", "exit 1"]


def test_port_must_be_a_number(monkeypatch, capsys):
    monkeypatch.setenv("PORT", "http")
    assert up.main() == 2
    assert "PORT=http is not a number" in capsys.readouterr().err
