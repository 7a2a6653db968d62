"""RabbitMQ's other cases of ``make faults``: custody cases, and clicks in Airflow's UI."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.case_result import CaseResult
from tests.faults.rabbitmq_cases import CASES, QueueHarness, RabbitCase
from tests.integration.clicks import CLICKS, COUNT, Click, Clicks, World, world_of
from tests.rabbitmq_server import RabbitServer

NamedCase = tuple[str, int, Callable[[], CaseResult]]


def rabbitmq_cases(folder: Path, wanted: str) -> Iterator[NamedCase]:
    """Yields each case's name, number of messages (0: known only at its end), and function.

    :param wanted: A part of the names of the cases to yield.
    """
    cases = [case for case in CASES if wanted in f"rabbitmq.{case.name}"]
    clicks = [click for click in CLICKS if wanted in f"rabbitmq.click.{click.name}"]
    clicks = [click for click in clicks if "rabbitmq" in click.brokers]
    if cases:
        yield from _custody_cases(folder, cases)
    if clicks:
        yield from _airflow_cases(folder / "clicks", clicks)


def _custody_cases(folder: Path, cases: list[RabbitCase]) -> Iterator[NamedCase]:
    with RabbitServer.start(folder / "server") as server:
        for case in cases:
            case_folder = folder / case.name
            case_folder.mkdir(parents=True)

            def run(case: RabbitCase = case, case_folder: Path = case_folder) -> CaseResult:
                return case.run(QueueHarness(server, case_folder))

            yield f"rabbitmq.{case.name}", 0, run


def _airflow_cases(folder: Path, clicks: list[Click]) -> Iterator[NamedCase]:
    folder.mkdir(parents=True)
    with world_of("rabbitmq", folder) as world:
        for click in clicks:
            yield f"rabbitmq.click.{click.name}", COUNT, _click_case(world, click)


def _click_case(world: World, click: Click) -> Callable[[], CaseResult]:
    def run() -> CaseResult:
        clicks = Clicks(world, click.name[:40])
        click.run(clicks)
        return clicks.result(click.name)

    return run
