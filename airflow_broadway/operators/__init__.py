"""Airflow operators: thin wrappers around the tasks of :mod:`airflow_broadway.runs`."""
