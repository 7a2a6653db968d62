"""The built wheel on each supported Airflow and Python: DAGs parse, a run is exact, pages load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from scripts.airflow_env import ROOT
from tests.matrix.cells import Cell, cells

HERE = Path(__file__).parent
#: Others need minutes, and Pythons that not every machine has.
FIRST, *OTHERS = cells()
IN_CI = bool(os.environ.get("CI") or os.environ.get("AIRFLOW_BROADWAY_CI"))


@pytest.mark.airflow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(FIRST, id=FIRST.name),
        *(pytest.param(cell, id=cell.name, marks=pytest.mark.slow) for cell in OTHERS),
    ],
)
def test_wheel_works(cell: Cell, tmp_path):
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    try:
        interpreter = cell.make(Path(wheel))
    except LookupError as error:
        pytest.skip(str(error))
    except subprocess.CalledProcessError as error:
        if IN_CI:
            raise
        pytest.skip(f"no environment for this cell: {error}")
    # Where the checkout is not: what is imported is what the wheel has.
    shutil.copytree(HERE / "dags", tmp_path / "dags")
    shutil.copy(HERE / "smoke.py", tmp_path)

    ended = subprocess.run(
        [interpreter, "-I", tmp_path / "smoke.py", tmp_path, ROOT / "dags", tmp_path / "dags"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["package"].startswith(str(interpreter.parent.parent))
    assert result["python"] == cell.python
    assert f"{result['airflow']}-{result['python']}" == cell.name or cell.name in (
        "lowest",
        "newest",
    )
    assert {"flights", "delta_flights", "kafka_flights", "smoke"} <= set(result["dags"])
    assert result["rows"] == [n for n in range(100) if n % 10]
    assert (result["left"], result["dead"]) == (0, 10)
    totals = {name: count for name, count in result["report"]["totals"].items() if count}
    assert totals == {
        "received": 100,
        "acked": 90,
        "dead_lettered": 10,
        "failed": 10,
        "accounted": 100,
    }
    assert result["report"]["balanced"] is True
    assert result["state"] == "success"
    assert result["views"] == ["nav", "dag_run"]
    assert [status for status, _ in result["pages"]] == [200, 200, 200]
    assert all("Smoke" in text for _, text in result["pages"])
