"""Sessions on a Spark Connect server, as far as they go without one."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.errors.exceptions.connect import SparkException, UnknownException
from pyspark.sql.connect.session import SparkSession

from airflow_broadway.spark.connect import ConnectSessions, Server, _release

SHUT_DOWN = "Job 1 cancelled because SparkContext was shut down"


def sessions(url="sc://host"):
    """Sessions on a server that answers."""
    opened = ConnectSessions.__new__(ConnectSessions)
    opened._server, opened._name, opened._sessions = Server(url=url), "name", {}
    opened._own, opened.main = threading.local(), Mock()
    return opened


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (SparkException(SHUT_DOWN), True),
        (SparkException(f"[CAST_INVALID_INPUT] The value '{SHUT_DOWN}' cannot be cast"), False),
        (
            UnknownException(
                "[INVALID_HANDLE.OPERATION_ABANDONED] The handle 1 is invalid.",
                reason="org.apache.spark.SparkSQLException",
            ),
            True,
        ),
        (PySparkRuntimeError("[RESPONSE_ALREADY_RECEIVED] Error from the server"), True),
        (ValueError("[INVALID_HANDLE] of another system"), False),
    ],
)
def test_operation_that_a_server_gave_up_is_no_failure_of_its_batch(error, lost):
    assert ("is lost" in sessions().why_lost(error)) is lost


def test_error_that_is_its_own_cause():
    error = ValueError("bad")
    error.__cause__ = error
    assert sessions().why_lost(error) == ""


def test_active_session_is_that_of_the_batch():
    # Given a thread's second batch, whose first has been released
    opened = sessions("sc://127.0.0.1:1")
    first: Any = opened._open("a")
    _release(first.client)

    second: Any = opened._open("b")
    active = SparkSession.getActiveSession()
    _release(second.client)
    assert active is second


@pytest.mark.parametrize("slash", ["/", "%2F"])
def test_token_with_slashes(slash):
    opened = sessions(f"sc://host/;user_id=ann;token=hu{slash}sh{slash}")
    assert opened._channel("name", "batch").token == "hu/sh/"
