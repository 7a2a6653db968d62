"""The verdict on a message depends only on its facts."""

from __future__ import annotations

from airflow_broadway.core.custody.verdicts import Action, Facts, Verdict, decide, delay_before
from airflow_broadway.core.model.pipeline_options import RetryPolicy


def test_delays_double_with_stable_jitter():
    policy = RetryPolicy(backoff=60.0, max_backoff=600.0, jitter=0.1)
    facts = [Facts("retry", attempt, message_id="m") for attempt in (1, 2, 3, 9)]
    delays = [delay_before(fact, policy) for fact in facts]
    assert delays == [delay_before(fact, policy) for fact in facts]
    for delay, middle in zip(delays, (60, 120, 240, 600), strict=True):
        assert 0.9 * middle <= delay <= 1.1 * middle
    many = {round(delay_before(Facts("retry", message_id=f"m-{n}"), policy)) for n in range(200)}
    assert min(many) < 56
    assert max(many) > 64


def test_exhausted_retry_is_dead_lettered_or_left():
    used = Facts("retry", 5, reason="why", stage="batch")
    kept = RetryPolicy(max_attempts=5)
    left = RetryPolicy(max_attempts=5, dead_letter=False)
    assert decide(Action.RETRY, used, kept) == Verdict(Action.DEAD_LETTER, 0.0, "why", "batch")
    assert decide(Action.RETRY, used, left) == Verdict(Action.LEAVE, 0.0, "why", "batch")
