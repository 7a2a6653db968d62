"""What runs in the Spark driver; importing it loads neither Spark nor Airflow.

================  ==================================================================
``launcher``      the script that ``spark-submit`` starts; checks Python, then ``job``
``job``           the entry: versions, work file, session, exit code
``session``       sessions, the application's and each batch's
``application``   the threads of one application
``batch``         one batch: its session, the callback, what came of it
``frame``         the DataFrame that ``handle_batch`` gets
``results``       what ``handle_batch`` may return
``unsuccessful``  which messages did not succeed by it
``entries``       their verdicts, as lines of the outcome
``files``         a run's folder through plain files or Hadoop
================  ==================================================================
"""

from __future__ import annotations

from airflow_broadway.spark.results import Failed, failed

__all__ = ["Failed", "failed"]
