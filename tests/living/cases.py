"""The living tests as cases of ``make faults``: each broker's series of runs in traffic."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.contract.sqs_harness import SharedClock
from tests.faults.found import Found
from tests.kafka_server import nearest_kafka
from tests.living.brokers import LivingBroker
from tests.living.brokers_kafka import LivingKafka
from tests.living.brokers_pubsub import LivingPubSub
from tests.living.brokers_rabbitmq import MortalRabbit
from tests.living.brokers_sqlite import LivingSqlite
from tests.living.brokers_sqs import LivingSqs
from tests.living.preemptions import Preemption, preempt
from tests.living.rounds import Round, play, weathers_for
from tests.pubsub_server import StubServer
from tests.rabbitmq_server import RabbitServer
from tests.sqs_server import SqsServer

#: Runs of a case, where not given.
RUNS = 60
#: Runs on one queue.
_ROUND = 6

Make = Callable[[Path], LivingBroker]


@contextmanager
def _sqlite(folder: Path) -> Iterator[Mapping[str, Make]]:
    yield {"living": LivingSqlite}


@contextmanager
def _rabbitmq(folder: Path) -> Iterator[Mapping[str, Make]]:
    with RabbitServer.start(folder / "server") as server:
        yield {
            "living": lambda place: MortalRabbit(server, place),
            "living_quorum": lambda place: MortalRabbit(server, place, queue="quorum"),
        }


@contextmanager
def _sqs(folder: Path) -> Iterator[Mapping[str, Make]]:
    clock = str(folder / "clock")
    SharedClock(clock)
    server = SqsServer(folder / "server", command=("tests.contract.sqs_harness", clock))
    server.run()
    try:
        yield {
            "living": lambda place: LivingSqs(server, clock),
            "living_fifo": lambda place: LivingSqs(server, clock, fifo=True),
        }
    finally:
        server.stop()


@contextmanager
def _kafka(folder: Path) -> Iterator[Mapping[str, Make]]:
    with nearest_kafka().start(folder / "server") as server:
        yield {
            "living": lambda place: LivingKafka(server, place),
            "living_key": lambda place: LivingKafka(server, place, order="key"),
            "living_shared": lambda place: LivingKafka(server, place, order="none"),
            "living_transactions": lambda place: LivingKafka(
                server, place, order="none", traffic="transactions"
            ),
            "living_growing": lambda place: LivingKafka(
                server, place, order="none", traffic="growing"
            ),
        }


@contextmanager
def _pubsub(folder: Path) -> Iterator[Mapping[str, Make]]:
    clock = str(folder / "clock")
    exactly = {"enable_exactly_once_delivery": True}
    with StubServer(SharedClock(clock)) as server:
        yield {
            "living": lambda place: LivingPubSub(server, clock),
            "living_keys": lambda place: LivingPubSub(server, clock, keyed=True),
            "living_exactly_once": lambda place: LivingPubSub(server, clock, **exactly),
        }


@dataclass(frozen=True, slots=True)
class _Kind:
    """A broker's cases.

    :param rates: Messages per second that its server, as tests have it, can take.
    :param preempted: The case whose runs are killed from outside.
    """

    open: Callable[[Path], AbstractContextManager[Mapping[str, Make]]]
    cases: Mapping[str, type[LivingBroker]]
    rates: tuple[float, ...]
    preempted: str = "living"


_KINDS = {
    "sqlite": _Kind(_sqlite, {"living": LivingSqlite}, (20.0, 100.0, 1_000.0)),
    "rabbitmq": _Kind(
        _rabbitmq, {"living": MortalRabbit, "living_quorum": MortalRabbit}, (20.0, 100.0, 2_000.0)
    ),
    "kafka": _Kind(
        _kafka,
        dict.fromkeys(
            ("living", "living_key", "living_shared", "living_transactions", "living_growing"),
            LivingKafka,
        ),
        (20.0, 100.0, 1_000.0),
        preempted="living_shared",
    ),
    "pubsub": _Kind(
        _pubsub,
        dict.fromkeys(("living", "living_keys", "living_exactly_once"), LivingPubSub),
        (20.0, 100.0, 1_000.0),
    ),
    "sqs": _Kind(_sqs, {"living": LivingSqs, "living_fifo": LivingSqs}, (20.0, 100.0, 300.0)),
}


def living_cases(
    broker: str, folder: Path, wanted: str, runs: int, seed: int, preempted: float
) -> Iterator[tuple[str, int, Callable[[], Found]]]:
    """A broker's cases whose names have ``wanted`` in them, and what runs each.

    :param preempted: Seconds for which runs are killed from outside, in the case of that name.
    """
    kind = _KINDS[broker]
    names = [name for name in kind.cases if wanted in f"{broker}.{name}"]
    kills = wanted in f"{broker}.preempted" and preempted > 0
    if not names and not kills:
        return
    place = folder / "living"
    place.mkdir(parents=True)
    with kind.open(place) as makes:
        for name in names:
            title, make = f"{broker}.{name}", makes[name]

            def run(
                title: str = title,
                make: Make = make,
                where: Path = place / name,
                weathers: Sequence[str] = weathers_for(kind.cases[name]),
            ) -> Found:
                return series(
                    title, make, where, runs=runs, seed=seed, rates=kind.rates, weathers=weathers
                )

            yield title, 0, run
        if kills:
            first = makes[kind.preempted]
            title = f"{broker}.preempted"
            yield title, 0, lambda: _preempted(title, first, place, seed, preempted)


def _preempted(title: str, make: Make, folder: Path, seed: int, seconds: float) -> Found:
    """Runs that are killed from outside, none of which ends untouched; then three quiet ones."""
    where = folder / "preempted"
    preemption = Preemption(
        make=make, folder=where, rate=40.0, seconds=seconds, dice=random.Random(seed)
    )
    account, kills = preempt(preemption)
    print(f"  {kills} kills: {account}", flush=True)
    result = Found(title, account.confirmed, duplicates=account.again, lost=account.lost)
    result.killed["process"] += kills
    result.unmarked += len(account.unmarked)
    result.mistakes += account.mistakes
    return result


def series(
    title: str,
    make: Make,
    folder: Path,
    *,
    runs: int,
    seed: int,
    rates: tuple[float, ...],
    weathers: Sequence[str],
) -> Found:
    """So many runs, in rounds: each weather in turn, each with all rates and endings in turn."""
    dice = random.Random(seed)
    result = Found(title, 0)
    places: Counter[str] = Counter()
    for number, first in enumerate(range(0, runs, _ROUND)):
        weather = weathers[number % len(weathers)]
        rate = rates[(number + number // len(weathers)) % len(rates)]
        summary = play(
            Round(
                make=make,
                folder=folder / f"{number}-{weather}",
                rate=rate,
                runs=min(_ROUND, runs - first),
                weather=weather,
                first=first,
                dice=dice,
                tell=lambda line: print(line, flush=True),
            )
        )
        print(f"  {number}, {weather}, {rate:.0f}/s: {summary}", flush=True)
        result.messages += summary.confirmed
        result.runs += min(_ROUND, runs - first)
        result.duplicates += summary.again
        result.unmarked += len(summary.unmarked)
        result.lost += summary.lost
        result.mistakes += [f"{number}, {weather}: {mistake}" for mistake in summary.mistakes]
        places += summary.places
    print(f"  left in queues: {dict(places)}", flush=True)
    return result
