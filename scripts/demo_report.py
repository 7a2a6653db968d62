"""The demo's report: compares the queue, the output and the runs with the data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.dataset as ds
from rich import box
from rich.console import Console
from rich.table import Table

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import ROOT

#: The classes of received messages; each message is in exactly one.
CLASSES = (
    "acked",
    "requeued",
    "dead_lettered",
    "left",
    "released",
    "lapsed",
    "settle_failed",
    "still_leased",
)

#: The names of the stages, and the prefixes of their task ids.
STAGES = {"process": "process", "batch": "batch.", "Spark": "handle_batches", "settle": "ack"}

#: Minutes after which a flight is delayed; independent of the pipeline, which it checks.
TOLERANCE = 15

REASON = "never departed"


@dataclass
class Expected:
    """The expected result, counted from the data as it is sent to the queue."""

    sent: int = 0
    never_departed: int = 0
    #: (batcher, airport) → flights.
    rows: Counter[tuple[str, str]] = field(default_factory=Counter)

    def count(self, flights: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Counts flights and yields them."""
        for flight in flights:
            self.sent += 1
            delay = flight["dep_delay"]
            if delay is None:
                self.never_departed += 1
            else:
                batcher = "delayed" if delay > TOLERANCE else "on_time"
                self.rows[batcher, flight["origin"]] += 1
            yield flight


@dataclass
class Run:
    """One finished run of the DAG.

    :param dag_run: The API's description of it.
    :param tasks: The API's descriptions of its task instances.
    :param report: The ack sensor's ``report.json``; empty if there is none.
    """

    dag_run: Mapping[str, Any]
    tasks: Sequence[Mapping[str, Any]]
    report: Mapping[str, Any]

    @property
    def run_id(self) -> str:
        return str(self.dag_run["dag_run_id"])

    @property
    def state(self) -> str:
        return str(self.dag_run["state"])

    @property
    def received(self) -> int:
        return int(self.report["totals"]["received"]) if self.report else 0


# ---------------------------------------------------------------------------------------- making
def make_report(
    expected: Expected,
    runs: Sequence[Run],
    queue: SqliteQueue,
    output: Path,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Returns the report of a demo as JSON values."""
    totals = Counter[str]()
    for run in runs:
        totals.update(run.report["totals"] if run.report else {})
    report = {
        "sent": expected.sent,
        "received": totals["received"],
        "failed": totals["failed"],
        "sum": {name: totals[name] for name in CLASSES},
        "balanced": all(run.report.get("balanced", False) for run in runs),
        "batchers": _batchers(runs),
        "runs": [
            {
                "run_id": run.run_id,
                "state": run.state,
                "seconds": round(_span([run.dag_run]), 2),
                "failed_tasks": [task["task_id"] for task in run.tasks if _has_failed(task)],
                "report": run.report.get("path"),
            }
            for run in runs
        ],
        "stages": list(_stages(runs, totals["received"])),
        "queue": queue.depth()._asdict(),
        "dead_letters": _dead_letters(queue),
        "output": _output(output),
        "results": results(output),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "expected": {"never_departed": expected.never_departed, "rows": _nested(expected.rows)},
    }
    return {**report, "mistakes": find_mistakes(report)}


def _has_failed(task: Mapping[str, Any]) -> bool:
    return task["state"] in ("failed", "upstream_failed")


def _batchers(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Returns messages, batches, outcomes and triggers by batcher."""
    batchers: dict[str, dict[str, Any]] = {}
    for run in runs:
        for name, result in (run.report.get("batchers") or {}).items():
            counts = batchers.setdefault(
                name, {"messages": 0, "batches": 0, "successful": 0, "failed": 0, "triggers": {}}
            )
            for key in ("messages", "batches", "successful", "failed"):
                counts[key] += result.get(key, 0)
            for trigger, batches in result.get("triggers", {}).items():
                counts["triggers"][trigger] = counts["triggers"].get(trigger, 0) + batches
    return batchers


def _stages(runs: Sequence[Run], received: int) -> Iterator[dict[str, Any]]:
    """Yields the seconds and messages per second of each stage by Airflow's task times."""
    batched = sum(batcher["messages"] for batcher in _batchers(runs).values())
    for stage, prefix in STAGES.items():
        seconds = 0.0
        for run in runs:
            own = [task for task in run.tasks if _has_run(task) and _id(task).startswith(prefix)]
            if stage == "settle":
                # The sensor starts with the run: only its time after the other tasks counts.
                others = [task for task in run.tasks if _has_run(task) and task not in own]
                seconds += _span([*others, *own]) - _span(others)
            else:
                seconds += _span(own)
        yield _stage(stage, received if stage in ("process", "settle") else batched, seconds)
    yield _stage("whole run", received, sum(_span([run.dag_run]) for run in runs))


def _stage(name: str, messages: int, seconds: float) -> dict[str, Any]:
    rate = round(messages / seconds) if seconds > 0 else None
    return {
        "name": name,
        "messages": messages,
        "seconds": round(seconds, 2),
        "messages_per_second": rate,
    }


def _id(task: Mapping[str, Any]) -> str:
    return str(task["task_id"]).removeprefix("broadway.")


def _has_run(task: Mapping[str, Any]) -> bool:
    return bool(task["start_date"] and task["end_date"] and task["state"] != "skipped")


def _span(tasks: Sequence[Mapping[str, Any]]) -> float:
    """Returns the seconds from the first start to the last end."""
    if not tasks:
        return 0.0
    start = min(datetime.fromisoformat(instance["start_date"]) for instance in tasks)
    end = max(datetime.fromisoformat(instance["end_date"]) for instance in tasks)
    return (end - start).total_seconds()


def _dead_letters(queue: SqliteQueue) -> dict[str, Any]:
    """Counts dead letters by reason, and those of flights that departed."""
    letters = queue.dead_letters(limit=None)
    return {
        "reasons": dict(Counter(letter.reason for letter in letters)),
        "departed": sum(json.loads(letter.body)["dep_delay"] is not None for letter in letters),
    }


# ---------------------------------------------------------------------------------------- output
def _dataset(folder: Path) -> ds.Dataset | None:
    if not folder.is_dir():
        return None
    if (folder / "_delta_log").is_dir():
        from deltalake import DeltaTable

        return DeltaTable(folder).to_pyarrow_dataset()
    return ds.dataset(folder, format="parquet", partitioning="hive")


def _output(output: Path) -> dict[str, Any]:
    """Counts the written rows by batcher and airport, and the distinct messages."""
    dataset = _dataset(output / "flights")
    if dataset is None:
        return {"path": str(output), "rows": 0, "messages": 0, "by_batcher": {}}
    table = dataset.to_table(columns=["message_id", "batcher", "origin"])
    grouped = table.group_by(["batcher", "origin"]).aggregate([([], "count_all")])
    rows = {(row["batcher"], row["origin"]): row["count_all"] for row in grouped.to_pylist()}
    return {
        "path": str(output),
        "rows": table.num_rows,
        "messages": pc.count_distinct(table["message_id"]).as_py(),
        "by_batcher": _nested(rows),
    }


def results(output: Path) -> list[dict[str, Any]]:
    """Returns, per airport, flights, the delayed share, and the hour with the worst mean delay."""
    dataset = _dataset(output / "flights")
    if dataset is None:
        return []
    table = dataset.to_table(columns=["batcher", "origin", "hour", "dep_delay"])
    grouped = table.group_by(["batcher", "origin", "hour"]).aggregate(
        [([], "count_all"), ("dep_delay", "sum")]
    )
    flights, delayed = Counter[str](), Counter[str]()
    hours: dict[str, dict[int, list[int]]] = {}
    for row in grouped.to_pylist():
        airport = row["origin"]
        flights[airport] += row["count_all"]
        delayed[airport] += row["count_all"] if row["batcher"] == "delayed" else 0
        hour = hours.setdefault(airport, {}).setdefault(row["hour"], [0, 0])
        hour[0] += row["count_all"]
        hour[1] += row["dep_delay_sum"]
    rows = []
    for airport in sorted(flights):
        worst = max(hours[airport], key=lambda hour: _mean(hours[airport][hour]))
        rows.append(
            {
                "airport": airport,
                "flights": flights[airport],
                "delayed": delayed[airport],
                "delayed_share": round(delayed[airport] / flights[airport], 4),
                "worst_hour": worst,
                "worst_hour_mean_delay": round(_mean(hours[airport][worst]), 1),
            }
        )
    return rows


def _mean(hour: Sequence[int]) -> float:
    return hour[1] / hour[0]


def _nested(rows: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (batcher, airport), count in sorted(rows.items()):
        nested.setdefault(batcher, {})[airport] = count
    return nested


# -------------------------------------------------------------------------------------- checking
def find_mistakes(report: Mapping[str, Any]) -> list[str]:
    """Returns the violations as sentences."""
    expected, queue, dead = report["expected"], report["queue"], report["dead_letters"]
    departed = report["sent"] - expected["never_departed"]
    problems = [
        f"run {run['run_id']} ended as {run['state']}; failed tasks: {run['failed_tasks']}"
        for run in report["runs"]
        if run["state"] != "success"
    ]

    def check(label: str, actual: object, expected: object) -> None:
        if actual != expected:
            problems.append(f"{label}: expected {expected}, got {actual}")

    check("every run balances", report["balanced"], True)
    check("messages received", report["received"], report["sent"])
    check("messages acknowledged", report["sum"]["acked"], departed)
    check("messages dead-lettered", report["sum"]["dead_lettered"], expected["never_departed"])
    for name in CLASSES:
        if name not in ("acked", "dead_lettered"):
            check(f"messages {name.replace('_', ' ')}", report["sum"][name], 0)
    for name in ("ready", "delayed", "leased"):
        check(f"messages left {name} in the queue", queue[name], 0)
    check("dead letters in the queue", queue["dead"], expected["never_departed"])
    reasons = {REASON: expected["never_departed"]} if expected["never_departed"] else {}
    check("dead letters by reason", dead["reasons"], reasons)
    check("dead letters of flights that departed", dead["departed"], 0)
    check("rows written", report["output"]["rows"], departed)
    check("different messages among them", report["output"]["messages"], departed)
    check("rows by batcher and airport", report["output"]["by_batcher"], expected["rows"])
    return problems


# --------------------------------------------------------------------------------------- showing
def display_path(path: Path) -> str:
    """Returns a path relative to the checkout if possible."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def print_report(report: Mapping[str, Any], path: Path, console: Console) -> None:
    """Prints the report as tables.

    :param path: The path of the JSON report.
    """
    for title, table in {
        "Every message received is in exactly one class": _sum_table(report),
        "Batches": _batch_table(report),
        "Stages": _stage_table(report),
        "What the flights say": _result_table(report),
    }.items():
        # Not as a table title, which would wrap at the table's width.
        console.print(f"\n{title}", style="bold")
        console.print(table)
    output = display_path(Path(report["output"]["path"]))
    console.print(
        f"\n{report['output']['rows']:,} rows in {output}/flights,"
        f" this report in {display_path(path)}."
        f"  {report['seconds']['total']:.0f} s in all.",
        markup=False,
    )
    console.print(
        """
Try next:
  make up                          that Airflow with its UI: the run, its graph, its logs
  .venv/bin/python -m scripts.load_flights --messages 5000 --seed 1
                                   more flights for the queue; then trigger the DAG in the UI
  make demo ARGS="--messages 5000" the demo, with the first 5,000 flights only
  dags/flights_pipeline.py         the pipeline: change it, run again""",
        markup=False,
    )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, column in enumerate(columns):
        words = number == 0 or column == "by trigger"
        table.add_column(column, justify="left" if words else "right", no_wrap=True)
    return table


def _sum_table(report: Mapping[str, Any]) -> Table:
    table = _table("class", "messages")
    table.add_row("received", f"{report['received']:,}")
    for name, count in report["sum"].items():
        table.add_row(f"  {name.replace('_', ' ')}", f"{count:,}")
    table.add_row("failed", f"{report['failed']:,}")
    for reason, count in report["dead_letters"]["reasons"].items():
        table.add_row(f"  {reason!r}", f"{count:,}")
    return table


def _batch_table(report: Mapping[str, Any]) -> Table:
    table = _table("batcher", "messages", "batches", "by trigger")
    for name, result in report["batchers"].items():
        triggers = ", ".join(f"{count} {name}" for name, count in result["triggers"].items())
        table.add_row(name, f"{result['messages']:,}", f"{result['batches']:,}", triggers)
    return table


def _stage_table(report: Mapping[str, Any]) -> Table:
    table = _table("stage", "messages", "seconds", "messages/s")
    for stage in report["stages"]:
        rate = stage["messages_per_second"]
        table.add_row(
            stage["name"],
            f"{stage['messages']:,}",
            f"{stage['seconds']:.1f}",
            "" if rate is None else f"{rate:,}",
        )
    return table


def _result_table(report: Mapping[str, Any]) -> Table:
    table = _table("airport", "flights", "delayed", "worst hour", "mean delay then")
    for row in report["results"]:
        table.add_row(
            row["airport"],
            f"{row['flights']:,}",
            f"{row['delayed_share']:.1%}",
            f"{row['worst_hour']}:00",
            f"{row['worst_hour_mean_delay']:.0f} min",
        )
    return table
