"""Whether a fork of a task's process can ask Airflow, too."""

from __future__ import annotations

from socket import socket
from typing import Any

from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import CommsDecoder

from airflow_broadway.adapters.host import Host
from tests.unit.operators.context import task_context


def test_fork_may_query_a_supervisor_process(monkeypatch):
    with socket() as supervisor:
        comms: CommsDecoder[Any, Any] = CommsDecoder(socket=supervisor)
        monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", comms, raising=False)
        assert Host(task_context()).task.forks


def test_in_process_airflow_forks_nothing_for_suspects(monkeypatch):
    # As in dag.test(): a fork would wait for ever for what threads of this process answer.
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", object(), raising=False)
    assert not Host(task_context()).task.forks
