"""A segmentation fault in a callback ends its task, though Airflow's Dag importer handles it."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

from airflow.dag_processing.dagbag import DagBag

from airflow_broadway import Message
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.producers.sqlite import SqliteQueue
from tests.unit.operators.context import task_context
from tests.unit.runs.steps import PlainSums


class Faulty(PlainSums):
    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        ctypes.string_at(0)
        return message


def test_segmentation_fault_ends_the_task(tmp_path):
    dag_file = tmp_path / "dag.py"
    dag_file.write_text("from airflow.sdk import DAG\n\nDAG('d')\n")
    with SqliteQueue(tmp_path / "queue.db", "sums") as queue:
        queue.send([b"1"])
    operator = BroadwayProcessorOperator(
        task_id="process",
        pipeline=Faulty(producer={"path": str(tmp_path / "queue.db")}, context={"calls": ""}),
        staging=f"file://{tmp_path}/staging",
    )

    task = os.fork()
    if not task:
        try:
            DagBag(str(dag_file))  # as Airflow's task runner does
            assert callable(signal.getsignal(signal.SIGSEGV))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            operator.execute(task_context(task_id="process", map_index=0))
        finally:
            os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(task, 0)[1]) == -signal.SIGSEGV
