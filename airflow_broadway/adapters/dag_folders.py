"""Makes modules next to Dag files importable, as in Airflow's own processes."""

from __future__ import annotations

import json
import sys
from pkgutil import resolve_name

from airflow.providers.common.compat.sdk import conf


def add_dag_folders() -> list[str]:
    """Adds the newest version of each Dag bundle to ``sys.path``.

    :returns: A sentence on each bundle that cannot be fetched: the pipeline may be in another.
    """
    failures = []
    for config in json.loads(conf.get("dag_processor", "dag_bundle_config_list") or "[]"):
        try:
            # Airflow's manager of bundles would log each command's.
            kwargs = config.get("kwargs") or {}
            bundle = resolve_name(config["classpath"])(name=config["name"], **kwargs)
            bundle.initialize()
        except Exception as error:
            failures.append(f"the Dag bundle {config['name']!r} cannot be fetched: {error}")
        else:
            if str(bundle.path) not in sys.path:
                sys.path.append(str(bundle.path))
    return failures
