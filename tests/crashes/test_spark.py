"""The Spark engine's own points: its driver, and the task that waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from airflow_broadway.testing.crashes import (
    Call,
    Campaign,
    Case,
    Embedded,
    Point,
    Recovery,
    Strike,
    What,
    warm_spark,
)
from tests.crashes.campaigns import MESSAGES
from tests.crashes.pipelines import OnSpark

pytestmark = [pytest.mark.spark, pytest.mark.slow]

BATCH = Call("handle_batch", "default")
DRIVER = Call("driver", "")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    with warm_spark():
        made = Campaign(partial(Embedded, OnSpark), MESSAGES, tmp_path_factory.mktemp("cases"))
        made.unharmed()
        yield made


@pytest.mark.parametrize(
    ("task", "call", "what", "recovery"),
    [
        # The driver dies in its second batch: the first one's outcome stands.
        ("driver", (BATCH, 2), What.KILLED_BEFORE, Recovery.RETRY),
        # It sleeps, and finds that the next try has handled its batches.
        ("driver", (BATCH, 1), What.ASLEEP_BEFORE, Recovery.RETRY),
        # The task dies, and its driver is at work beside the next try's.
        ("spark", (DRIVER, 1), What.KILLED_HALFWAY, Recovery.RETRY),
        # spark-submit is lost after the driver has done all.
        ("spark", (DRIVER, 1), What.ANSWER_LOST, Recovery.RETRY),
    ],
)
def test_every_message_is_accounted_for(
    campaign: Campaign, task: str, call: tuple[Call, int], what: What, recovery: Recovery
) -> None:
    point = Point(f"one/{task}/1", *call)

    result, folder = campaign.run(Case((Strike(point, what),), recovery))

    assert result.good, (result.account.lines, folder)


def test_the_driver_has_points_of_its_own(campaign: Campaign) -> None:
    points, _ = campaign.unharmed().points

    calls = [point.call for point in points if point.execution == "one/driver/1"]
    assert calls[0].target.endswith("work/spark-000001.json")
    assert calls.count(BATCH) == 2
    assert calls[-1] == Call("return", "")
