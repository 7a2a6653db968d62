"""What Airflow reads to list this package among its providers.

Airflow imports this module in every one of its processes, so it imports nothing.
"""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """Return the provider's description, in the form of Airflow's ``provider_info.schema.json``."""
    return {
        "package-name": "airflow-broadway",
        "name": "Broadway",
        "description": "Broadway (Elixir) for Airflow: micro-batch runs that drain message queues, "
        "process them with Spark and settle every message by the outcome of its work.",
    }
