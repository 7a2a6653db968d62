"""Runs in an environment of the matrix, where nothing of this checkout can be imported.

``python smoke.py FOLDER DAGS...``: parses the DAG files, drains an embedded queue with ``airflow
dags test``, counts every message, and asks the pages.  Its last line of output is a JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MESSAGES = 100


def parse(folders: list[str]) -> list[str]:
    """Returns the ids of the DAGs; fails with the import errors."""
    try:
        from airflow.dag_processing.dagbag import DagBag
    except ImportError:  # Airflow 3.1
        from airflow.models.dagbag import DagBag  # type: ignore[no-redef]
    ids = []
    for folder in folders:
        sys.path.insert(0, folder)
        bag = DagBag(folder)
        assert not bag.import_errors, bag.import_errors
        ids += bag.dag_ids
    return sorted(ids)


def drain(folder: Path) -> dict[str, Any]:
    """Runs the pipeline and returns the run's report, with what is in the queue and the table."""
    import pyarrow.dataset

    from airflow_broadway.producers.sqlite import SqliteQueue

    with SqliteQueue(folder / "queue.db", "smoke") as queue:
        queue.send([json.dumps({"n": n}).encode() for n in range(MESSAGES)])
        airflow("dags", "test", "smoke")
        depth = queue.depth()
    rows = pyarrow.dataset.dataset(folder / "rows", partitioning="hive").to_table()
    [report] = (folder / "staging").rglob("report.json")
    return {
        "report": json.loads(report.read_text()),
        "left": depth.ready + depth.delayed + depth.leased,
        "dead": depth.dead,
        "rows": sorted(rows["n"].to_pylist()),
    }


def pages() -> dict[str, Any]:
    """Returns what Airflow's API server answers, with the plugin mounted as it mounts it."""
    from airflow.api_fastapi.app import create_app
    from fastapi.testclient import TestClient

    with TestClient(create_app(), base_url="http://localhost") as client:
        token = client.get("/auth/token").json()["access_token"]
        headers = {"Authorization": f"Bearer {token}"}
        plugins = client.get("/api/v2/plugins", headers=headers).json()["plugins"]
        runs = client.get("/api/v2/dags/smoke/dagRuns", headers=headers).json()["dag_runs"]
        client.cookies.set("_token", token)
        run = f"/broadway/dags/smoke/runs/{runs[0]['dag_run_id']}"
        answers = {path: client.get(path) for path in ("/broadway/", run, f"{run}/report")}
    return {
        "state": runs[0]["state"],
        "views": [
            view["destination"]
            for plugin in plugins
            if plugin["name"] == "broadway"
            for view in plugin["external_views"]
        ],
        "pages": [(answer.status_code, answer.text) for answer in answers.values()],
    }


def airflow(*arguments: str) -> None:
    command = [sys.executable, "-m", "airflow", *arguments]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(arguments)}:\n{ended.stdout.decode(errors='replace')[-6000:]}")


def main(folder: Path, dags: list[str]) -> None:
    os.environ |= {
        "AIRFLOW_HOME": str(folder / "home"),
        "AIRFLOW__CORE__DAGS_FOLDER": dags[-1],
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__BROADWAY__STAGING": f"file://{folder / 'staging'}",
        "PYTHONPATH": dags[-1],
        "SMOKE_FOLDER": str(folder),
    }
    airflow("db", "migrate")
    import airflow as package

    import airflow_broadway

    result = {
        "airflow": package.__version__,
        "package": airflow_broadway.__file__,
        "python": ".".join(map(str, sys.version_info[:2])),
        "dags": parse(dags),
        **drain(folder),
        **pages(),
    }
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
