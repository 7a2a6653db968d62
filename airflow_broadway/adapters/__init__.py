"""Airflow as the host of a run's tasks: what fills the ports of :mod:`airflow_broadway.runs`.

Shared by operators, sensor, hooks and command line, which alone may import it.
"""
