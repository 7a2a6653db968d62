"""Process tasks that fail without a retry, though all messages are accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowFailException

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.producers.sqlite import SqliteQueue
from tests.unit.operators.context import task_context
from tests.unit.runs.steps import PlainSums, Sums


class Task:
    """A process task on a queue of five numbers."""

    def __init__(self, folder: Path, pipeline: type[Sums]) -> None:
        self.pushed: dict[str, Any] = {}
        with SqliteQueue(folder / "queue.db", "sums") as queue:
            queue.send([b"%d" % number for number in range(1, 6)])
        self.operator = BroadwayProcessorOperator(
            task_id="process",
            pipeline=pipeline(producer={"path": str(folder / "queue.db")}, context={"calls": ""}),
            staging=f"file://{folder}/staging",
            idle_seconds=0.0,
        )

    def execute(self) -> dict[str, Any]:
        return self.operator.execute(
            task_context(task_id="process", map_index=0, pushed=self.pushed)
        )


@pytest.mark.parametrize(
    ("settled", "why"),
    [
        (SettleReport(acked=4, lapsed=1), "1 message had lapsed"),
        (SettleReport(acked=4, failed=1), "1 could not be settled"),
        (SettleReport(acked=1, dead_lettered=4), ""),
    ],
)
def test_unbatched_task_fails_for_lapsed_messages_without_retry(
    tmp_path, monkeypatch, settled, why
):
    monkeypatch.setattr("airflow_broadway.runs.settle.settle_generation", lambda *_, **__: settled)
    task = Task(tmp_path, PlainSums)

    if not why:
        assert task.execute()["received"] == 5
        return
    with pytest.raises(AirflowFailException, match=f"settled or released, but {why}"):
        task.execute()


@pytest.mark.parametrize(("pipeline", "fails"), [(Sums, True), (PlainSums, False)])
def test_process_cleared_after_its_sensor_fails_with_an_explanation(
    tmp_path, monkeypatch, pipeline, fails
):
    monkeypatch.setattr("airflow_broadway.operators.process.ended_sensor", lambda *_: "ack")
    task = Task(tmp_path, pipeline)

    if not fails:  # it has settled what it received
        assert task.execute()["received"] == 5
        return
    with pytest.raises(AirflowFailException, match=r"5 messages are received and held, and 'ack'"):
        task.execute()
    # and what it received can be settled once that is cleared
    assert task.pushed["return_value"]["received"] == 5
