"""The command ``airflow-broadway``: looks at staged runs, dead letters, archives and brokers.

``app`` and ``arguments`` declare the commands, each of which is a module; ``opening`` finds what a
command names, ``output`` prints.
``docs/cli.md`` is its guide.
"""

from __future__ import annotations

from airflow_broadway.cli.app import main

__all__ = ["main"]
