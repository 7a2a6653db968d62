"""Rounds of runs: each a queue of its own, a weather, and endings in turn, by seeded chance.

A round ends with its account; several make a series of as many runs as are wanted.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.proxy import Proxy
from tests.living.brokers import Lapsing, LivingBroker, Mortal, Networked
from tests.living.brokers_rabbitmq import LivingRabbit
from tests.living.endings import ENDINGS, HARMS, Ending
from tests.living.ledger import Account
from tests.living.series import Series
from tests.living.workers import Worker

#: Seconds of a lease that lapses while its process is stopped.
_SHORT = 4.0
#: The part of a run by which one kill is later than the one before; runs of any number of kills
#: are spread evenly by it.
_STEP = (5**0.5 - 1) / 2
#: Writes of a run of which nothing is known yet.
_WRITES = 60

#: Writes of the last whole run: of which broker, with which ending and flow.
_seen: dict[tuple[str, str, str], int] = {}


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round.

    :param make: Makes the queue, with its files in a folder.
    :param rate: Messages published per second.
    :param runs: How many.
    :param weather: What goes on meanwhile; one of :data:`WEATHERS`.
    :param first: Which of the endings comes first.
    """

    make: Callable[[Path], LivingBroker]
    folder: Path
    rate: float
    runs: int
    weather: str
    first: int
    dice: random.Random
    tell: Callable[[str], None] = print


def play(given: Round) -> Account:
    """Plays it."""
    weather = WEATHERS[given.weather]
    with ExitStack() as stack:
        broker = given.make(given.folder)
        proxy = None
        if weather.latency is not None:
            assert isinstance(broker, Networked), f"{given.weather} needs a network"
            proxy = stack.enter_context(Proxy(broker.address(), latency=weather.latency))
            broker.reached_by(proxy.port)
        series = stack.enter_context(Series(broker, given.folder, rate=given.rate))
        table = _Table(given, broker, series, proxy)
        stack.callback(table.close)
        for turn in _turns(given):
            weather.play(table, turn)
        table.close()
        summary = series.close(exact=weather.exact, forgetful=weather.deadly)
        if weather.exact:  # else late settlements are refused, and reported as such
            summary.mistakes += table.surprises
        return summary


def _turns(given: Round) -> Iterator[tuple[Ending, str]]:
    """Endings in turn, each in one of its flows."""
    for place in range(given.first, given.first + given.runs):
        ending = ENDINGS[place % len(ENDINGS)]
        flows = ending.flows
        yield ending, flows[(place // len(ENDINGS)) % len(flows)]


class _Table:
    """The broker, series and proxy of a round."""

    def __init__(
        self, given: Round, broker: LivingBroker, series: Series, proxy: Proxy | None
    ) -> None:
        self.given = given
        self.broker = broker
        self.series = series
        self.proxy = proxy
        self.dice = given.dice
        #: What runs raised that should not.
        self.surprises: list[str] = []
        self._workers: list[Worker] = []
        self._instant = given.dice.random()
        self._numbers = itertools.count(given.first + 1)

    def worker(self, place: int = 0) -> Worker:
        """One of the processes at work."""
        while len(self._workers) <= place:
            self._workers.append(Worker(self.given.folder / f"worker-{len(self._workers)}.log"))
        return self._workers[place]

    def kill(self, place: int = 0) -> None:
        """Kills one; another takes its place when it is wanted."""
        self._workers[place].end()
        self._workers[place] = Worker(self.given.folder / f"worker-{place}.log")
        if isinstance(self.broker, Lapsing) and self.dice.random() < 0.5:
            self.broker.lapse()

    def close(self) -> None:
        """Ends all processes."""
        while self._workers:
            self._workers.pop().end()

    def name(self) -> str:
        """A name for a run."""
        return f"run-{next(self._numbers)}"

    def begin(self, turn: tuple[Ending, str], worker: Worker, **more: Any) -> str:
        """Begins a run that ends so; its name."""
        ending, flow = turn
        # These runs follow each other immediately and take two seconds: unless the
        # broker its queues need not be that old.
        young = not WEATHERS[self.given.weather].deadly
        harm = {"young_queues": young, "no_grace": True, **more.pop("harm", {}), **ending.harm}
        command = {
            "flow": flow,
            "budget": ending.budget,
            "producer": {**ending.producer, **more.pop("producer", {})},
            "context": ending.context,
            "harm": harm,
            "run": more.pop("run", None) or self.name(),
            **more,
        }
        if ending.timeout:
            command["timeout"] = self.dice.uniform(0.1, 0.8)
        self.given.tell(f"  {command['run']}: {ending.name}, {flow}, {self.given.weather}")
        self.series.begin(worker, **command)
        return str(command["run"])

    def instant(self, turn: tuple[Ending, str]) -> int:
        """At which write of a run that ends so the next kill is: all are spread over its length."""
        self._instant = (self._instant + _STEP) % 1.0
        writes = _seen.get((self.broker.kind, turn[0].name, turn[1]), _WRITES)
        return 1 + int(self._instant * writes)

    def finish(self, turn: tuple[Ending, str], worker: Worker) -> dict[str, Any]:
        """Ends a run as it is to end, and waits for it."""
        if turn[0].number is not None:
            time.sleep(self.dice.uniform(0.05, 0.8))
            while not worker.done:  # the first may come before the run listens
                worker.signal(turn[0].number)
                time.sleep(0.2)
        answer = self.series.end(worker)
        _seen[self.broker.kind, turn[0].name, turn[1]] = answer["writes"]
        if answer["raised"] and not (
            turn[0].raises and answer["raised"].startswith(turn[0].raises)
        ):
            self.surprises.append(f"{answer['run']}, {turn[0].name}, raised {answer['raised']}")
        return answer


@dataclass(frozen=True, kw_only=True)
class _Weather:
    """The events during runs.

    :param exact: Whether the runs' reports must agree with the truth.
    :param latency: Seconds each way through a proxy; ``None``: no proxy.
    :param deadly: Whether the broker's server is killed: acknowledgements of a classic queue that
        RabbitMQ has not written down by then it forgets.
    :param only: The brokers with which it is played.
    """

    play: Callable[[_Table, tuple[Ending, str]], None]
    exact: bool = True
    latency: float | None = None
    deadly: bool = False
    only: type = object

    def fits(self, broker: type[LivingBroker]) -> bool:
        """Whether it can be played with this broker."""
        wanted = (
            self.only,
            object if self.latency is None else Networked,
            Mortal if self.deadly else object,
        )
        return all(issubclass(broker, kind) for kind in wanted)


def _one(harm: str) -> Callable[[_Table, tuple[Ending, str]], None]:
    """One run after another."""

    def play(table: _Table, turn: tuple[Ending, str]) -> None:
        worker = table.worker()
        table.begin(turn, worker, harm=HARMS[harm])
        table.finish(turn, worker)

    return play


def _stalls(table: _Table, turn: tuple[Ending, str]) -> None:
    """The network stands still in mid-stream, for less than anybody's patience."""
    worker = table.worker()
    table.begin(turn, worker)
    if table.proxy is not None:
        time.sleep(table.dice.uniform(0.0, 0.6))
        table.proxy.stall()
        time.sleep(table.dice.uniform(0.2, 1.2))
        table.proxy.go_on()
    table.finish(turn, worker)


def _broken(harm: str) -> Callable[[_Table, tuple[Ending, str]], None]:
    """The network drops or half-closes all connections, three times in a run."""

    def play(table: _Table, turn: tuple[Ending, str]) -> None:
        worker = table.worker()
        table.begin(turn, worker)
        for _ in range(3):
            time.sleep(table.dice.uniform(0.1, 0.7))
            getattr(table.proxy, harm)()
        table.finish(turn, worker)

    return play


def _two(table: _Table, turn: tuple[Ending, str]) -> None:
    """Two runs at once, of which neither takes the other for dead."""
    one, two = table.worker(0), table.worker(1)
    names = [table.name(), table.name()]
    other = (ENDINGS[0], turn[1])
    table.begin(turn, one, run=names[0], running=names)
    table.begin(other, two, run=names[1], running=names)
    table.finish(turn, one)
    table.finish(other, two)


def _killed(table: _Table, turn: tuple[Ending, str]) -> None:
    """``kill -9`` at a random time; its messages are released by the next run, or lapse."""
    table.begin(turn, table.worker())
    time.sleep(table.dice.uniform(0.2, 2.5))
    table.kill()


def _killed_at_writes(table: _Table, turn: tuple[Ending, str]) -> None:
    """``kill -9`` as a run writes: to a file, to the broker, or as it commits."""
    worker = table.worker()
    table.begin(turn, worker, harm={"freeze_at_any": table.instant(turn)})
    if turn[0].number is not None:
        time.sleep(table.dice.uniform(0.3, 0.8))
        worker.signal(turn[0].number)
    if worker.frozen():
        table.kill()
    else:
        table.finish(turn, worker)


def _broker_dies(table: _Table, turn: tuple[Ending, str]) -> None:
    """``kill -9`` to the broker's server, which is started again; the run may or may not wait."""
    assert isinstance(table.broker, Mortal)
    worker = table.worker()
    table.begin(turn, worker)
    # Before, while and after it waits for queues that are old enough.
    time.sleep(table.dice.uniform(0.1, 5.0))
    table.broker.die()
    table.finish(turn, worker)


def _settled_twice(table: _Table, turn: tuple[Ending, str]) -> None:
    """A process stops at one of its writes; another settles its run meanwhile; then it goes on."""
    one, two = table.worker(0), table.worker(1)
    turn = (turn[0], "staged")
    harm = {**HARMS["quick"], "freeze_at": table.dice.randint(5, 30)}
    name = table.begin(turn, one, harm=harm)
    if one.frozen():
        table.series.run(two, run=name, flow="ack")
        table.begin((ENDINGS[0], "staged"), two, running=[name])
        table.series.end(two)
        one.signal(signal.SIGCONT)
    table.finish(turn, one)


def _zombie(table: _Table, turn: tuple[Ending, str]) -> None:
    """A process stops for longer than its lease; another takes over; then it wakes."""
    one, two = table.worker(0), table.worker(1)
    lease = {"lease": _SHORT}
    name = table.begin(turn, one, producer=lease)
    time.sleep(table.dice.uniform(0.1, 0.8))
    one.signal(signal.SIGSTOP)
    while not table.broker.free():  # no other run could take over
        one.signal(signal.SIGCONT)
        time.sleep(0.01)
        one.signal(signal.SIGSTOP)
    time.sleep(_SHORT + 0.5)
    table.begin((ENDINGS[0], turn[1]), two, producer=lease, running=[name])
    table.series.end(two)
    one.signal(signal.SIGCONT)
    table.finish(turn, one)


WEATHERS = {
    "calm": _Weather(play=_one("quick")),
    "slow_staging": _Weather(play=_one("slow_staging")),
    "slow_journal": _Weather(play=_one("slow_journal")),
    "far_away": _Weather(play=_one("quick"), latency=0.04),
    "stalls": _Weather(play=_stalls, latency=0.0),
    "cut": _Weather(play=_broken("cut"), exact=False, latency=0.0, only=LivingRabbit),
    "half_closed": _Weather(
        play=_broken("half_close"), exact=False, latency=0.0, only=LivingRabbit
    ),
    "two_at_once": _Weather(play=_two),
    "killed": _Weather(play=_killed, exact=False),
    "killed_at_writes": _Weather(play=_killed_at_writes, exact=False),
    "broker_dies": _Weather(play=_broker_dies, exact=False, deadly=True),
    "settled_twice": _Weather(play=_settled_twice, exact=False),
    "zombies": _Weather(play=_zombie, exact=False),
}


def weathers_for(broker: type[LivingBroker]) -> list[str]:
    """The names of those that can be played with this broker."""
    return [name for name, weather in WEATHERS.items() if weather.fits(broker)]
