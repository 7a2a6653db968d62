from __future__ import annotations

import json

import pytest

from airflow_broadway.core.errors import ConnectionMissing
from airflow_broadway.hooks.sqlite import BroadwaySqliteHook


def connect(monkeypatch: pytest.MonkeyPatch, **fields: str) -> None:
    monkeypatch.setenv(
        "AIRFLOW_CONN_BROADWAY_SQLITE_DEFAULT",
        json.dumps({"conn_type": "broadway_sqlite", **fields}),
    )


def test_hook_opens_queues_by_name(monkeypatch, tmp_path):
    connect(monkeypatch, host=str(tmp_path / "q.db"))
    hook = BroadwaySqliteHook()
    assert hook.test_connection() == (True, "The first message creates it.")

    with hook.get_queue("flights") as queue:
        queue.send([b"x"])

        assert hook.get_queue("flights").path == queue.path == hook.get_conn()
    assert hook.test_connection() == (True, "The queue file is in order.")


def test_unusable_connection_is_explained(monkeypatch, tmp_path):
    connect(monkeypatch, host=str(tmp_path / "missing" / "q.db"))
    works, reason = BroadwaySqliteHook().test_connection()
    assert not works
    assert "missing does not exist; make it, or correct the path" in reason

    connect(monkeypatch)
    with pytest.raises(ConnectionMissing, match="names no queue file"):
        BroadwaySqliteHook().get_queue("flights")
