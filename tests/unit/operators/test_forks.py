"""Whether a fork of a task's process can ask Airflow, too."""

from __future__ import annotations

from socket import socket
from typing import Any

import pytest
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import CommsDecoder

from airflow_broadway.adapters.host import Host
from tests.unit.operators.context import task_context


def test_a_fork_can_ask_a_supervisor_that_is_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket() as supervisor:
        comms: CommsDecoder[Any, Any] = CommsDecoder(socket=supervisor)
        monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", comms, raising=False)
        assert Host(task_context()).task.forks


def test_where_airflow_is_in_this_process_nothing_is_forked_for_suspects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in dag.test(): a fork would wait for ever for what threads of this process answer.
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", object(), raising=False)
    assert not Host(task_context()).task.forks
