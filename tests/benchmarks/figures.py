"""The figures of ``make bench``."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from scripts.local_airflow import LocalAirflow

#: ``{"name", "value", "unit"}``, and ``"ratio"`` with ``"of"``, the figure it is compared with.
Figures = list[dict[str, Any]]


class Took(NamedTuple):
    """What one try of one thing took."""

    messages: int
    seconds: float
    cpu: float
    requests: int = 0

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds

    @property
    def cpu_of_each(self) -> float:
        """Microseconds of processor time for a message."""
        return 1e6 * self.cpu / self.messages


@contextmanager
def folder_of_its_own() -> Iterator[Path]:
    """A new folder, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="broadway-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def rate(name: str, messages: int, seconds: float) -> dict[str, Any]:
    """Messages per second."""
    return {"name": name, "value": round(messages / seconds), "unit": "msg/s"}


def memory(name: str, peak: int) -> dict[str, Any]:
    """Peak memory, of bytes."""
    return {"name": f"{name}.peak", "value": round(peak / 2**20), "unit": "MiB"}


def took(name: str, tries: Sequence[float]) -> dict[str, Any]:
    """The median of seconds."""
    return {"name": name, "value": round(statistics.median(tries), 2), "unit": "s"}


def median(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    digits: int | None = None,
    of: str = "",
    ratios: Sequence[float] = (),
) -> dict[str, Any]:
    """The median of tries; with ratios, also theirs to another figure."""
    figure = {"name": name, "value": round(statistics.median(values), digits), "unit": unit}
    if ratios:
        figure |= {"ratio": round(statistics.median(ratios), 2), "of": of}
    return figure


def run_of(airflow: LocalAirflow, dag_id: str) -> float:
    """Runs a Dag; seconds from the start of the run to its end."""
    run = airflow.trigger(dag_id)
    state = airflow.wait_for_run(dag_id, run, timeout=1_800)
    if state != "success":
        raise RuntimeError(f"{dag_id} ended as {state}")
    dag_run = airflow.dag_run(dag_id, run)
    begun, ended = (datetime.fromisoformat(dag_run[name]) for name in ("start_date", "end_date"))
    return (ended - begun).total_seconds()
