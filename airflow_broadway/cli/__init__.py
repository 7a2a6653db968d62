"""The command ``airflow-broadway``: inspects staged runs, dead letters, archives and brokers.

``app`` and ``arguments`` declare the commands; each command is a module.  ``opening`` loads
pipelines and producers, ``output`` prints.  ``docs/cli.md`` is the guide.
"""

from __future__ import annotations

from airflow_broadway.cli.app import main

__all__ = ["main"]
