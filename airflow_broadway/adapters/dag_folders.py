"""Makes modules next to Dag files importable, as in Airflow's own processes, and parses Dags."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

from airflow.providers.common.compat.sdk import conf

from airflow_broadway.adapters.versions import parse_folder


def add_dag_folders() -> list[str]:
    """Adds the newest version of each Dag bundle to ``sys.path``.

    :returns: A sentence on each bundle that cannot be fetched: the pipeline may be in another.
    """
    return [failure for _, failure in _bundles() if failure]


def parse_dags() -> tuple[list[Any], dict[str, str]]:
    """Parses all Dag bundles in this process.

    :returns: The Dags, and the import error of each file, or of each bundle that cannot be fetched.
    """
    dags: list[Any] = []
    errors: dict[str, str] = {}
    for path, failure in _bundles():
        if failure:
            errors[path] = failure
            continue
        bag = parse_folder(path)
        dags += bag.dags.values()
        errors |= bag.import_errors
    return dags, errors


def _bundles() -> Iterator[tuple[str, str]]:
    """Yields the folder of each Dag bundle; or its name, and why it cannot be fetched."""
    for config in json.loads(conf.get("dag_processor", "dag_bundle_config_list") or "[]"):
        try:
            # Airflow's manager of bundles would log each command's.
            kwargs = config.get("kwargs") or {}
            bundle = resolve_name(config["classpath"])(name=config["name"], **kwargs)
            bundle.initialize()
        except Exception as error:
            name = config["name"]
            yield str(name), f"the Dag bundle {name!r} cannot be fetched: {error}"
        else:
            if str(bundle.path) not in sys.path:
                sys.path.append(str(bundle.path))
            yield str(bundle.path), ""
