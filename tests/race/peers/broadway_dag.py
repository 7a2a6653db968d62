"""The DAG of an Airflow: the next run begins when one ends."""

from airflow.sdk import DAG
from broadway_pipeline import BUDGET, Rows

with DAG("race", schedule="@continuous", max_active_runs=1) as dag:
    Rows().task_group(process=BUDGET)
