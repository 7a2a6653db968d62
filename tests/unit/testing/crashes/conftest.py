"""Restores functions that boundaries replace; a kill raises an exception instead."""

from __future__ import annotations

import builtins
import io
import os
import socket
import sqlite3
import ssl

import pytest

from airflow_broadway.testing.crashes.interceptor import Interceptor
from tests.unit.testing.crashes.injection import Died

_REPLACED = (
    (os, "open fsync link replace rename remove unlink mkdir rmdir listdir scandir"),
    (builtins, "open"),
    (io, "open"),
    (sqlite3, "connect"),
    (socket.socket, "connect send sendall"),
    (ssl.SSLSocket, "send sendall"),
)


@pytest.fixture(autouse=True)
def restore_replaced_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, names in _REPLACED:
        for name in names.split():
            monkeypatch.setattr(owner, name, getattr(owner, name))

    def die(interceptor: Interceptor) -> None:
        raise Died

    monkeypatch.setattr(Interceptor, "_die", die)
