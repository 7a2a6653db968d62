"""What the tasks of a run do; knows no Airflow."""
