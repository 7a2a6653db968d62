"""Makes modules next to Dag files importable, as in Airflow's own processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from airflow.providers.common.compat.sdk import conf


def add_dag_folders() -> None:
    """Adds the folders of Dag files to ``sys.path``, as Airflow's own processes do."""
    try:
        bundles = json.loads(conf.get("dag_processor", "dag_bundle_config_list", fallback="[]"))
    except ValueError:
        bundles = []
    folders = [
        conf.get("core", "dags_folder", fallback=""),
        *((b.get("kwargs") or {}).get("path") for b in bundles if isinstance(b, Mapping)),
        conf.get("core", "plugins_folder", fallback=""),
    ]
    for folder in folders:
        if folder and folder not in sys.path and Path(folder).is_dir():
            sys.path.append(str(folder))
