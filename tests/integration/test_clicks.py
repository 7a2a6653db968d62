"""User actions on a run in the UI, on every broker: see :mod:`tests.integration.clicks`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integration.click_queues import SERVERS
from tests.integration.clicks import CLICKS, Clicks, World, world_of

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(600)]


def _on_every_broker() -> Iterator[object]:
    """Yields each user action on each broker; those that need a server are slow."""
    for broker in SERVERS:
        for click in CLICKS:
            if broker in click.brokers:
                marks = [] if broker == "sqlite" else [pytest.mark.slow, pytest.mark.broker]
                marks += [pytest.mark.spark] if click.spark else []
                yield pytest.param(broker, click, id=f"{broker}-{click.name}", marks=marks)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """The Airflow of a broker, one for all of its clicks."""
    started: dict[str, World] = {}
    with ExitStack() as stack:

        def world(broker: str) -> World:
            if broker not in started:
                stack.close()
                started.clear()
                folder = tmp_path_factory.mktemp(f"clicks-{broker}")
                started[broker] = stack.enter_context(world_of(broker, folder))
            return started[broker]

        yield world


@pytest.mark.parametrize(("broker", "click"), list(_on_every_broker()))
def test_messages_end_where_expected_when_users(worlds, broker, click):
    clicks = Clicks(worlds(broker), click.name[:40])

    click.run(clicks)

    result = clicks.result(click.name)
    assert (result.lost, result.unmarked, result.mistakes) == ([], 0, [])
