"""Crash tests by fault injection, at every external call of a pipeline.

A run has a countable number of external calls: a file created, linked or listed, an SQL statement,
a frame or request sent, a callback, a task's return.  A :class:`.campaign.Campaign` runs a pipeline
once and records them.  It then repeats the run for each call, in processes that are killed there as
by ``kill -9``, fail there, or are suspended there and resumed after others have recovered.  Each
time the scheduler continues as Airflow would, the queue is drained, and every message is accounted
for.

::

    campaign = Campaign(functools.partial(Embedded, Orders), [b"1", b"2", b"3"], folder)
    totals = campaign.run_cases(campaign.cases([Family.CRASHES]), jobs=2)
    assert totals.passed, totals.failures[0]

A pipeline with a Spark batcher runs within :func:`.spark.warm_spark`.

The command ``airflow-broadway crash-test`` tests a user's pipeline and sink.
"""
