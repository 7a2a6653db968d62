"""All of RabbitMQ's cases next to the killed runs, for ``make faults``: one server, one Airflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.found import Found
from tests.faults.rabbitmq_cases import CASES, Place, RabbitCase
from tests.integration.clicks import CLICKS, COUNT, Click, Clicks, World, world_of
from tests.rabbitmq_server import RabbitServer

Named = tuple[str, int, Callable[[], Found]]


def rabbitmq_cases(folder: Path, wanted: str) -> Iterator[Named]:
    """Yields each case's name, messages (0: the case counts them), and the function that runs it.

    :param wanted: What a case's name must have in it; for others nothing is started.
    """
    cases = [case for case in CASES if wanted in f"rabbitmq.{case.name}"]
    clicks = [click for click in CLICKS if wanted in f"rabbitmq.click.{click.name}"]
    clicks = [click for click in clicks if "rabbitmq" in click.brokers]
    if cases:
        yield from _by_hand(folder, cases)
    if clicks:
        yield from _in_airflow(folder / "clicks", clicks)


def _by_hand(folder: Path, cases: list[RabbitCase]) -> Iterator[Named]:
    with RabbitServer.start(folder / "server") as server:
        for case in cases:
            place = folder / case.name
            place.mkdir(parents=True)

            def run(case: RabbitCase = case, place: Path = place) -> Found:
                return case.run(Place(server, place))

            yield f"rabbitmq.{case.name}", 0, run


def _in_airflow(folder: Path, clicks: list[Click]) -> Iterator[Named]:
    folder.mkdir(parents=True)
    with world_of("rabbitmq", folder) as world:
        for click in clicks:
            yield f"rabbitmq.click.{click.name}", COUNT, _clicked(world, click)


def _clicked(world: World, click: Click) -> Callable[[], Found]:
    def run() -> Found:
        clicks = Clicks(world, click.name[:40])
        click.run(clicks)
        return clicks.found(click.name)

    return run
