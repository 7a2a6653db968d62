"""The Spark driver; importing this package imports neither Spark nor Airflow.

================  ==================================================================
``launcher``      the script that ``spark-submit`` starts; checks Python, then ``job``
``job``           the entry point: versions, work file, session, exit code
``session``       sessions of the application and of each batch
``application``   the threads of one application
``batch``         one batch: its session, the callback, the outcome
``frame``         the DataFrame argument of ``handle_batch``
``results``       the return values of ``handle_batch``
``unsuccessful``  the messages that did not succeed
``entries``       their verdicts, as lines of the outcome
``files``         a run's folder through plain files or Hadoop
================  ==================================================================
"""

from __future__ import annotations

from airflow_broadway.spark.results import Failed, failed

__all__ = ["Failed", "failed"]
