"""The context in which Airflow executes a task, as far as the operators look into it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def task_context(
    run_id: str = "r",
    *,
    task_id: str = "task",
    map_index: int = -1,
    running: bool = True,
    pushed: dict[str, Any] | None = None,
) -> Any:
    """The context of one task of the Dag ``d``.

    :param running: Whether other runs of the Dag are at work, when the task asks.
    :param pushed: Takes the XComs that the task pushes.
    """
    xcoms = {} if pushed is None else pushed
    ti = SimpleNamespace(
        id="0" * 32,
        dag_id="d",
        run_id=run_id,
        task_id=task_id,
        map_index=map_index,
        try_number=1,
        get_dr_count=lambda **_: int(running),
        xcom_push=lambda key, value: xcoms.update({key: value}),
    )
    names = ("start_date", "logical_date", "data_interval_start", "data_interval_end")
    dates = dict.fromkeys(names)
    dag_run = SimpleNamespace(run_id=run_id, run_type="manual", **dates)
    return {"ti": ti, "dag_run": dag_run, "params": {}}
