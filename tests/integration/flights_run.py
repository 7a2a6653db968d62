"""A run of a broker's ``dags/*_flights.py`` in a real Airflow, checked against the flights sent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.dataset as ds

from scripts.airflow_env import ROOT, airflow_env, home_of
from scripts.demo_report import CLASSES, Expected
from scripts.load_flights import flights
from scripts.local_airflow import LocalAirflow, free_port

#: The seed that chooses the flights; even a few include some that never departed.
SEED = 20_130


class FlightsRun:
    """A run of a broker's flights Dag.

    :param broker: As in the Dag's name.
    """

    def __init__(self, broker: str, folder: Path, messages: int) -> None:
        self.expected = Expected()
        self._broker, self._folder = broker, folder
        self._sent = list(self.expected.count(flights(messages, SEED)))
        assert self.expected.never_departed

    def run(self, environment: Mapping[str, str], **conf: Any) -> None:
        """Runs the Dag, and checks its output and its report."""
        folder, dag = self._folder, f"{self._broker}_flights"
        env = airflow_env(
            # The home of the demo's tests: its database is created once.
            home=home_of(ROOT, f"airflow-test-{self._broker}"),
            port=free_port(),
            settings={"broadway.staging": f"file://{folder / 'staging'}"},
        )
        parts = ("api-server", "scheduler", "dag-processor")
        with LocalAirflow({**env, **environment}, folder / "logs", components=parts) as airflow:
            airflow.wait_for_dag(dag)
            run = airflow.trigger(dag, {"output": str(folder / "output"), **conf})
            state = airflow.wait_for_run(dag, run, timeout=1500)
        assert state == "success"
        check_output(folder / "output", self._sent, self.expected)
        [report] = (folder / "staging").rglob("report.json")
        check_report(json.loads(report.read_text()), self.expected)


def check_output(folder: Path, sent: list[Any], expected: Expected) -> None:
    dataset = ds.dataset(folder / "flights", format="parquet", partitioning="hive")
    rows = dataset.to_table(columns=["message_id", "batcher", "origin", "dep_delay", "flight"])
    departed = [flight for flight in sent if flight["dep_delay"] is not None]
    assert pc.count_distinct(rows["message_id"]).as_py() == rows.num_rows == len(departed)
    placed = zip(rows["batcher"].to_pylist(), rows["origin"].to_pylist(), strict=True)
    assert Counter(placed) == expected.rows
    pairs = zip(rows["flight"].to_pylist(), rows["dep_delay"].to_pylist(), strict=True)
    assert Counter(pairs) == Counter(
        (f"{flight['carrier']}{flight['flight']}", flight["dep_delay"]) for flight in departed
    )


def check_report(report: dict[str, Any], expected: Expected) -> None:
    totals = report["totals"]
    assert report["balanced"]
    assert totals["received"] == expected.sent
    assert {name: totals[name] for name in CLASSES} == {
        **dict.fromkeys(CLASSES, 0),
        "acked": expected.sent - expected.never_departed,
        "dead_lettered": expected.never_departed,
    }
