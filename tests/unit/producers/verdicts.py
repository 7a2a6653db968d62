"""Verdicts of every kind, as hypothesis draws them."""

from __future__ import annotations

from airflow_broadway.core.custody.verdicts import ACK, LEAVE, RELEASE, Action, Verdict

VERDICTS = [
    ACK,
    LEAVE,
    RELEASE,
    Verdict(Action.RETRY, 0.0, "at once", "process"),
    Verdict(Action.RETRY, 30.0, "later", "process"),
    Verdict(Action.DEAD_LETTER, 0.0, "bad", "process"),
]
