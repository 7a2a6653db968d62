"""Executors of their own read a bucket, in a small cluster: its driver, a worker, an executor."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.spark.application import run_work
from airflow_broadway.spark.arrow import ArrowFiles
from tests.s3_server import s3_server
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged, rows
from tests.unit.spark.session import local_cluster_env, run_application

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")
pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(540)]


def application(root: Path) -> None:
    """Handles batches in a bucket; the keys in the environment of each process are denied."""
    from airflow_broadway.spark.session import ClassicSessions, open_session

    folder, path = root / "staging", "Counting/dag/run"
    with s3_server() as server:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            **local_cluster_env(),
        }
        store = server.store(server.root())
        store.root_id()
        staged = Staged(folder / path)
        plan = staged.plan("default", [Planned(f"b{n}", rows(5, prefix=f"b{n}-")) for n in (0, 1)])
        work = staged.work(Counting, plan)
        store.fs.put(f"{folder}/", f"{store.root}/", recursive=True)
        server.denied = "none"
        uri = f"{store.spark_uri()}/{path}"
        files = ArrowFiles(uri, server.options())
        session = open_session()
        files.check_executor(session, f"{plan.path}/plan.jsonl")
        sizes: dict[str, int] = {}

        def callback(messages: Any, info: Any) -> None:
            sizes[info.batch_id] = messages.count()

        Counting.callback = staticmethod(callback)
        code = run_work(ClassicSessions(session), uri, files, work, arrow=files)
        session.stop()
        staged.files = files  # type: ignore[assignment]
        outcomes = {name: row.successful for name, row in staged.outcomes("default").items()}
    (root / "result.json").write_text(json.dumps([code, sizes, outcomes]))


def test_executors_read_a_bucket_with_the_drivers_credentials(tmp_path):
    code, sizes, outcomes = run_application(__name__, tmp_path)
    assert (code, sizes, outcomes) == (0, {"b0": 5, "b1": 5}, {"b0": 5, "b1": 5})


if __name__ == "__main__":
    application(Path(sys.argv[1]))
