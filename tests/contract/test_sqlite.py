from __future__ import annotations

import pytest

from airflow_broadway.testing.contract import CustodyContract, DeadLettersContract
from tests.contract.sqlite_harness import SqliteHarness


class OnSqlite:
    @pytest.fixture
    def harness(self, tmp_path):
        return SqliteHarness(str(tmp_path / "queue.db"))


class TestSqlite(OnSqlite, CustodyContract):
    pass


class TestDeadLetters(OnSqlite, DeadLettersContract):
    pass
