"""A driver on a host whose clock is wrong judges leases by the clock of the run's folder."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.core.formats.store_clock import StoreClock
from airflow_broadway.spark.application import run_work
from airflow_broadway.spark.batch import BatchRunner
from airflow_broadway.spark.session import ClassicSessions
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged, rows
from tests.unit.spark.test_log_ids import Session, outcome


@pytest.mark.parametrize(
    ("offset", "left", "valid"), [(900.0, 300.0, True), (-900.0, -300.0, False)]
)
def test_lease_is_judged_by_the_folders_clock(tmp_path, monkeypatch, caplog, offset, left, valid):
    staged = Staged(tmp_path)
    plan = staged.plan("wide", [Planned("b0", rows(1))])
    staged.lease(seconds=left)
    seen: list[Callable[[], None]] = []

    def handled(self, planned, *, lane=0):
        seen.append(lambda: self.app.ownership.check(planned.sources, fresh=True))
        return outcome(planned, plan)

    monkeypatch.setattr(BatchRunner, "run", handled)
    host = StoreClock(SystemClock(), offset)
    monkeypatch.setattr("airflow_broadway.spark.application.SystemClock", lambda: host)
    work = staged.work(Counting, plan)

    for _ in range(2):  # a cluster may start a driver again with the same work
        caplog.clear()
        run_work(ClassicSessions(Session()), staged.uri, staged.files, work)
        assert sum("The clock of host" in record.getMessage() for record in caplog.records) == 1
    if valid:
        seen[-1]()
    else:
        with pytest.raises(LeaseLapsed, match="lapsed at"):
            seen[-1]()
