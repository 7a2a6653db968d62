"""Airflow operators: thin covers over ``core``, ``producers`` and ``staging``."""
