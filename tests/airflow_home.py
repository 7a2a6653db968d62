"""Homes for a test's own Airflow whose database is made already: making one takes many seconds."""

from __future__ import annotations

import shutil
from pathlib import Path

from scripts.airflow_env import ROOT, home_of


def made_home(home: Path) -> Path:
    """Copy the database that ``make test`` has made to ``home``, unless one is there already.

    Where there is none, as without ``make``, the Airflow that starts there makes its own.

    :returns: ``home``.
    """
    made = home_of(ROOT, "airflow-test")
    if (made / "migrated").exists() and not (home / "migrated").exists():
        home.mkdir(parents=True, exist_ok=True)
        for name in ("airflow.db", "migrated"):
            shutil.copy2(made / name, home)
    return home
