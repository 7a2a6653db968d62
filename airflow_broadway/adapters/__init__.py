"""Airflow as the host of a run's tasks: implements the ports of :mod:`airflow_broadway.runs`.

Only operators, sensors, hooks and the command line may import it.
"""
