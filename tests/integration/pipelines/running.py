"""One fast run after another: ``dag.test()`` on a queue and a staging root of a test's own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from airflow.dag_processing.bundles.manager import DagBundlesManager
from airflow.models.dag import DagModel
from airflow.models.serialized_dag import SerializedDagModel
from airflow.sdk import DAG
from airflow.serialization.definitions.dag import SerializedDAG
from airflow.serialization.serialized_objects import LazyDeserializedDAG
from airflow.utils.session import create_session
from sqlalchemy import update

from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.producers.sqlite import SqliteQueue

_BUNDLE = "tests"


@dataclass
class Ran:
    """A run that has ended."""

    run: Any
    world: World

    @property
    def state(self) -> str:
        return str(self.run.state)

    @property
    def run_id(self) -> str:
        return str(self.run.run_id)

    @property
    def states(self) -> dict[str, str]:
        """States by task id without its group, and by map index where it is mapped."""
        return {name: str(item.state) for name, item in self._tasks().items()}

    @property
    def tries(self) -> dict[str, int]:
        return {name: int(item.try_number) for name, item in self._tasks().items()}

    def _tasks(self) -> dict[str, Any]:
        named = {}
        for instance in self.run.get_task_instances():
            name = str(instance.task_id).removeprefix("broadway.")
            named[name + (f"[{instance.map_index}]" if instance.map_index >= 0 else "")] = instance
        return named

    def xcom(self, task_id: str, map_index: int = -1) -> Any:
        """Returns the return value of a task; ``None`` if it has none."""
        from airflow.models.xcom import XComModel
        from sqlalchemy import select

        with create_session() as session:
            values = session.scalars(
                select(XComModel.value).where(
                    XComModel.run_id == self.run_id,
                    XComModel.dag_id == self.run.dag_id,
                    XComModel.task_id.in_([task_id, f"broadway.{task_id}"]),
                    XComModel.map_index == map_index,
                    XComModel.key == "return_value",
                )
            ).first()
        return json.loads(values) if isinstance(values, str) else values

    @property
    def report(self) -> dict[str, Any]:
        """The run's ``report.json``."""
        for path in self.world.staging.rglob("report.json"):
            result: dict[str, Any] = json.loads(path.read_text())
            if result["run_id"] == self.run_id:
                return result
        raise AssertionError(f"run {self.run_id} left no report under {self.world.staging}")

    @property
    def totals(self) -> dict[str, int]:
        """The totals that are not 0."""
        return {name: count for name, count in self.report["totals"].items() if count}


class World:
    """The queue file, staging root and connections of one test."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.staging = folder / "staging"
        self.patch = patch
        self.file = folder / "queue.db"
        self.queue = SqliteQueue(self.file, "puppets")
        self.queue.create()
        (folder / "dags").mkdir()
        bundle = {
            "name": _BUNDLE,
            "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
            "kwargs": {"path": str(folder / "dags")},
        }
        patch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST", json.dumps([bundle]))
        patch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{self.staging}")
        self.connect("puppets", {"conn_type": "broadway_sqlite", "host": str(self.file)})

    def close(self) -> None:
        """Leaves no Dag that later tests of this process would find."""
        self.queue.close()
        statement = update(DagModel).where(DagModel.bundle_name == _BUNDLE)
        with create_session() as session:
            session.execute(statement.values(is_stale=True))

    def connect(self, conn_id: str, connection: Mapping[str, Any]) -> None:
        """Defines an Airflow connection."""
        self.patch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(dict(connection)))

    def send(self, *messages: Mapping[str, Any] | bytes) -> list[str]:
        """Enqueues messages; returns their ids."""
        return self.queue.send(
            message if isinstance(message, bytes) else json.dumps(dict(message))
            for message in messages
        )

    def numbers(self, numbers: Iterable[int], **fields: Any) -> list[str]:
        """Enqueues messages that differ by their numbers alone."""
        return self.send(*({"n": number, **fields} for number in numbers))

    def run(self, dag: DAG, conf: Mapping[str, Any] | None = None) -> Ran:
        """Runs a Dag to its end; all messages are sent already, so it waits for no others."""
        DagBundlesManager().sync_bundles_to_db()
        lazy = LazyDeserializedDAG.from_dag(dag)
        with create_session() as session:
            SerializedDAG.bulk_write_to_db(_BUNDLE, None, [lazy], session=session)
            session.commit()
            SerializedDagModel.write_dag(lazy, bundle_name=_BUNDLE, session=session)
        return Ran(dag.test(run_conf={"idle_seconds": 0.0, **(conf or {})}), self)

    @property
    def depth(self) -> tuple[int, int, int, int]:
        """Ready, delayed, leased, dead."""
        queue_depth: QueueDepth = self.queue.depth()
        return queue_depth.ready, queue_depth.delayed, queue_depth.leased, queue_depth.dead

    def reasons(self) -> dict[int, str]:
        """Returns the dead letters' reasons, by number."""
        dead = self.queue.dead_letters(limit=None)
        return {json.loads(message.body)["n"]: message.reason for message in dead}
