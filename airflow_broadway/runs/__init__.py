"""The tasks of a run, independent of Airflow."""
