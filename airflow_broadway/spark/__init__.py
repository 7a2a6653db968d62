"""What runs in the Spark driver; importing it loads neither Spark nor Airflow.

===============  ==================================================================
``launcher``     the script that ``spark-submit`` starts; checks Python, then ``job``
``job``          the entry: versions, session, work file, exit code
``work``         the threads of one application
``turns``        which batch may run next: order per partition and per key
``fence``        whether this application may still act for its run
``batch``        one batch: its session, the callback, what came of it
``frame``        the DataFrame that ``handle_batch`` gets
``results``      what ``handle_batch`` may return
``outcome``      from what it returned to the outcome file
``files``        a run's folder through plain files, Hadoop or fsspec
===============  ==================================================================
"""

from __future__ import annotations

from airflow_broadway.spark.results import Failed, failed

__all__ = ["Failed", "failed"]
