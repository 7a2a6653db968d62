"""The command ``airflow-broadway``: look at staged runs, run their batches again, serve a queue,
check a RabbitMQ.

``app`` has the arguments, ``runs`` and ``find`` look at runs, ``replay`` and ``spark`` run batches
again, ``queue`` serves the embedded queue, ``rabbitmq`` looks at a broker, ``output`` prints.
``docs/cli.md`` is its guide.
"""

from __future__ import annotations

from airflow_broadway.cli.app import main

__all__ = ["main"]
