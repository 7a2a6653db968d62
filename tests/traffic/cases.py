"""The traffic tests as cases of ``make faults``: a series of rounds for each broker."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.contract.sqs_harness import SharedClock
from tests.faults.case_result import CaseResult
from tests.kafka_server import nearest_kafka
from tests.pubsub_server import StubServer
from tests.rabbitmq_server import RabbitServer
from tests.sqs_server import SqsServer
from tests.traffic.brokers import BrokerAdapter
from tests.traffic.brokers_kafka import KafkaTraffic
from tests.traffic.brokers_pubsub import PubSubTraffic
from tests.traffic.brokers_rabbitmq import RestartableRabbitMQ
from tests.traffic.brokers_sqlite import SqliteTraffic
from tests.traffic.brokers_sqs import SqsTraffic
from tests.traffic.preemption import PreemptionCase, run_preemption
from tests.traffic.rounds import Round, run_round, scenarios_for

#: Runs of a round, which all use one queue.
_ROUND = 6

Make = Callable[[Path], BrokerAdapter]


@contextmanager
def _sqlite(folder: Path) -> Iterator[Mapping[str, Make]]:
    yield {"traffic": SqliteTraffic}


@contextmanager
def _rabbitmq(folder: Path) -> Iterator[Mapping[str, Make]]:
    with RabbitServer.start(folder / "server") as server:
        yield {
            "traffic": lambda folder: RestartableRabbitMQ(server, folder),
            "traffic_quorum": lambda folder: RestartableRabbitMQ(server, folder, queue="quorum"),
        }


@contextmanager
def _sqs(folder: Path) -> Iterator[Mapping[str, Make]]:
    clock = str(folder / "clock")
    SharedClock(clock)
    server = SqsServer(folder / "server", command=("tests.contract.sqs_harness", clock))
    server.run()
    try:
        yield {
            "traffic": lambda folder: SqsTraffic(server, clock),
            "traffic_fifo": lambda folder: SqsTraffic(server, clock, fifo=True),
        }
    finally:
        server.stop()


@contextmanager
def _kafka(folder: Path) -> Iterator[Mapping[str, Make]]:
    with nearest_kafka().start(folder / "server") as server:
        yield {
            "traffic": lambda folder: KafkaTraffic(server, folder),
            "traffic_key": lambda folder: KafkaTraffic(server, folder, order="key"),
            "traffic_shared": lambda folder: KafkaTraffic(server, folder, order="none"),
            "traffic_transactions": lambda folder: KafkaTraffic(
                server, folder, order="none", traffic="transactions"
            ),
            "traffic_growing": lambda folder: KafkaTraffic(
                server, folder, order="none", traffic="growing"
            ),
        }


@contextmanager
def _pubsub(folder: Path) -> Iterator[Mapping[str, Make]]:
    clock = str(folder / "clock")
    exactly = {"enable_exactly_once_delivery": True}
    with StubServer(SharedClock(clock)) as server:
        yield {
            "traffic": lambda folder: PubSubTraffic(server, clock),
            "traffic_keys": lambda folder: PubSubTraffic(server, clock, keyed=True),
            "traffic_exactly_once": lambda folder: PubSubTraffic(server, clock, **exactly),
        }


@dataclass(frozen=True, slots=True)
class _BrokerCases:
    """The cases of a broker.

    :param rates: Publish rates, in messages per second, that the test server sustains.
    :param preempted: The case whose adapter the preemption case uses.
    """

    open: Callable[[Path], AbstractContextManager[Mapping[str, Make]]]
    cases: Mapping[str, type[BrokerAdapter]]
    rates: tuple[float, ...]
    preempted: str = "traffic"


_BROKERS = {
    "sqlite": _BrokerCases(_sqlite, {"traffic": SqliteTraffic}, (20.0, 100.0, 1_000.0)),
    "rabbitmq": _BrokerCases(
        _rabbitmq,
        {"traffic": RestartableRabbitMQ, "traffic_quorum": RestartableRabbitMQ},
        (20.0, 100.0, 2_000.0),
    ),
    "kafka": _BrokerCases(
        _kafka,
        dict.fromkeys(
            ("traffic", "traffic_key", "traffic_shared", "traffic_transactions", "traffic_growing"),
            KafkaTraffic,
        ),
        (20.0, 100.0, 1_000.0),
        preempted="traffic_shared",
    ),
    "pubsub": _BrokerCases(
        _pubsub,
        dict.fromkeys(("traffic", "traffic_keys", "traffic_exactly_once"), PubSubTraffic),
        (20.0, 100.0, 1_000.0),
    ),
    "sqs": _BrokerCases(
        _sqs, {"traffic": SqsTraffic, "traffic_fifo": SqsTraffic}, (20.0, 100.0, 300.0)
    ),
}


def traffic_cases(
    broker: str, folder: Path, wanted: str, runs: int, seed: int, preempted: float
) -> Iterator[tuple[str, int, Callable[[], CaseResult]]]:
    """Yields the name, 0 and the function of each case whose name contains ``wanted``.

    :param preempted: Duration of the preemption case in seconds.
    """
    kind = _BROKERS[broker]
    names = [name for name in kind.cases if wanted in f"{broker}.{name}"]
    kills = wanted in f"{broker}.preempted" and preempted > 0
    if not names and not kills:
        return
    folder = folder / "traffic"
    folder.mkdir(parents=True)
    with kind.open(folder) as constructors:
        for name in names:
            case_name, make = f"{broker}.{name}", constructors[name]

            def run(
                case_name: str = case_name,
                make: Make = make,
                round_folder: Path = folder / name,
                scenarios: Sequence[str] = scenarios_for(kind.cases[name]),
            ) -> CaseResult:
                return run_series(
                    case_name,
                    make,
                    round_folder,
                    runs=runs,
                    seed=seed,
                    rates=kind.rates,
                    scenarios=scenarios,
                )

            yield case_name, 0, run
        if kills:
            first = constructors[kind.preempted]
            case_name = f"{broker}.preempted"
            yield case_name, 0, lambda: _preempted(case_name, first, folder, seed, preempted)


def _preempted(case_name: str, make: Make, folder: Path, seed: int, seconds: float) -> CaseResult:
    """Runs the preemption case: every run is killed, then three runs finish the messages."""
    round_folder = folder / "preempted"
    preemption = PreemptionCase(
        make=make, folder=round_folder, rate=40.0, seconds=seconds, rng=random.Random(seed)
    )
    account, kills = run_preemption(preemption)
    print(f"  {kills} kills: {account}", flush=True)
    result = CaseResult(
        case_name, account.confirmed, duplicates=account.duplicates, lost=account.lost
    )
    result.killed["process"] += kills
    result.unmarked += len(account.unmarked)
    result.mistakes += account.mistakes
    return result


def run_series(
    case_name: str,
    make: Make,
    folder: Path,
    *,
    runs: int,
    seed: int,
    rates: tuple[float, ...],
    scenarios: Sequence[str],
) -> CaseResult:
    """Runs rounds that cycle through scenarios, rates and endings."""
    rng = random.Random(seed)
    result = CaseResult(case_name, 0)
    places: Counter[str] = Counter()
    for number, first in enumerate(range(0, runs, _ROUND)):
        scenario = scenarios[number % len(scenarios)]
        rate = rates[(number + number // len(scenarios)) % len(rates)]
        summary = run_round(
            Round(
                make=make,
                folder=folder / f"{number}-{scenario}",
                rate=rate,
                runs=min(_ROUND, runs - first),
                scenario=scenario,
                first=first,
                rng=rng,
                log=lambda line: print(line, flush=True),
            )
        )
        print(f"  {number}, {scenario}, {rate:.0f}/s: {summary}", flush=True)
        result.messages += summary.confirmed
        result.runs += min(_ROUND, runs - first)
        result.duplicates += summary.duplicates
        result.unmarked += len(summary.unmarked)
        result.lost += summary.lost
        result.mistakes += [f"{number}, {scenario}: {mistake}" for mistake in summary.mistakes]
        places += summary.places
    print(f"  left in queues: {dict(places)}", flush=True)
    return result
