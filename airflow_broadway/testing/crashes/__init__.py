"""Kill a pipeline at every point at which it touches the world, and count every message.

A run touches the world only at countable points: a file made, linked or listed, a statement, a
frame or request sent, a callback, a task's return.  A :class:`Campaign` runs a pipeline once and
writes them down.  Then it runs it again for each of them, in processes that die there as by
``kill -9``, fail there, or fall asleep there and wake when others have recovered.  Each time it
goes on as Airflow would, drains the queue, and counts what became of every message.

::

    campaign = Campaign(functools.partial(Embedded, Orders), [b"1", b"2", b"3"], folder)
    sums = campaign.strike(campaign.cases([Family.CRASHES]), jobs=2)
    assert sums.good, sums.failures[0]

A pipeline with a Spark batcher is struck within :func:`warm_spark`.

The command ``airflow-broadway crash-test`` does so for a user's pipeline and sink.
"""

from __future__ import annotations

from airflow_broadway.testing.crashes.campaign import (
    Campaign,
    Failure,
    Family,
    Sums,
    UnsoundPipeline,
)
from airflow_broadway.testing.crashes.case import Case, Recovery, Result
from airflow_broadway.testing.crashes.points import Call, Point, Strike, What
from airflow_broadway.testing.crashes.spark import uses_spark, warm_spark
from airflow_broadway.testing.crashes.subject import Embedded, Letter, Subject

__all__ = [
    "Call",
    "Campaign",
    "Case",
    "Embedded",
    "Failure",
    "Family",
    "Letter",
    "Point",
    "Recovery",
    "Result",
    "Strike",
    "Subject",
    "Sums",
    "UnsoundPipeline",
    "What",
    "uses_spark",
    "warm_spark",
]
