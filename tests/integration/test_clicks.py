"""What people do to a run in the UI, on every broker: see :mod:`tests.integration.clicks`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.click_queues import SERVERS
from tests.integration.clicks import CLICKS, Click, Clicks, World, world_of

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(600)]


def _on_every_broker() -> Iterator[object]:
    """The embedded queue always; what needs a server, if there is time."""
    for broker in SERVERS:
        for click in CLICKS:
            if broker in click.brokers:
                marks = [] if broker == "sqlite" else [pytest.mark.slow, pytest.mark.broker]
                marks += [pytest.mark.spark] if click.spark else []
                yield pytest.param(broker, click, id=f"{broker}-{click.name}", marks=marks)


@pytest.fixture(scope="module")
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    with world_of(request.param, tmp_path_factory.mktemp(f"clicks-{request.param}")) as world:
        yield world


@pytest.mark.parametrize(("world", "click"), list(_on_every_broker()), indirect=["world"])
def test_messages_are_where_they_should_be_when_users(world: World, click: Click) -> None:
    clicks = Clicks(world, click.name[:40])

    click.run(clicks)

    found = clicks.found(click.name)
    assert (found.lost, found.unmarked, found.mistakes) == ([], 0, [])
