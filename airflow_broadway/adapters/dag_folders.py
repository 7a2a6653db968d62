"""Where Airflow's own processes find what lies beside Dag files."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from airflow.providers.common.compat.sdk import conf


def add_dag_folders() -> None:
    """Let this process import what lies beside Dag files, as Airflow's own processes do."""
    try:
        bundles = json.loads(conf.get("dag_processor", "dag_bundle_config_list", fallback="[]"))
    except ValueError:
        bundles = []
    folders = [
        conf.get("core", "dags_folder", fallback=""),
        *((each.get("kwargs") or {}).get("path") for each in bundles if isinstance(each, Mapping)),
        conf.get("core", "plugins_folder", fallback=""),
    ]
    for folder in folders:
        if folder and folder not in sys.path and Path(folder).is_dir():
            sys.path.append(str(folder))
