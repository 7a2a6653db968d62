"""Rounds of runs: a round has a new queue and a scenario, and cycles through the endings.

At its end the messages are counted.
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
from tests.traffic.accounting import Account
from tests.traffic.brokers import BrokerAdapter, LeaseExpiring, Networked, Restartable
from tests.traffic.brokers_rabbitmq import RabbitMQTraffic
from tests.traffic.endings import DELAYS, ENDINGS, Ending
from tests.traffic.series import Series
from tests.traffic.workers import Worker

#: Lease, in seconds, that expires while its process is stopped.
_SHORT = 4.0
#: Distance between two kills as a fraction of a run's writes.  Multiples of the golden ratio are
#: spread evenly for any number of kills.
_STEP = (5**0.5 - 1) / 2
#: Assumed number of writes before a run has been measured.
_WRITES = 60

#: Number of writes of the last complete run, by broker, ending and flow.
_write_counts: dict[tuple[str, str, str], int] = {}


@dataclass(frozen=True, kw_only=True)
class Round:
    """The parameters of a round.

    :param make: Creates the queue, with its files in a folder.
    :param rate: Messages published per second.
    :param runs: The number of runs.
    :param scenario: A key of :data:`SCENARIOS`.
    :param first: The index of the first ending.
    """

    make: Callable[[Path], BrokerAdapter]
    folder: Path
    rate: float
    runs: int
    scenario: str
    first: int
    rng: random.Random
    log: Callable[[str], None] = print


def run_round(case: Round) -> Account:
    """Runs a round; returns the counts of its messages."""
    scenario = SCENARIOS[case.scenario]
    with ExitStack() as stack:
        broker = case.make(case.folder)
        proxy = None
        if scenario.latency is not None:
            assert isinstance(broker, Networked), f"{case.scenario} needs a network"
            proxy = stack.enter_context(Proxy(broker.address(), latency=scenario.latency))
            broker.use_proxy(proxy.port)
        series = stack.enter_context(Series(broker, case.folder, rate=case.rate))
        state = _RoundState(case, broker, series, proxy)
        stack.callback(state.close)
        for plan in _plans(case):
            scenario.run(state, plan)
        state.close()
        summary = series.close(exact=scenario.exact, forgetful=scenario.restarts_broker)
        if scenario.exact:  # otherwise late settlements may raise
            summary.mistakes += state.unexpected_errors
        return summary


def _plans(case: Round) -> Iterator[tuple[Ending, str]]:
    """Yields the ending and the flow of each run."""
    for index in range(case.first, case.first + case.runs):
        ending = ENDINGS[index % len(ENDINGS)]
        flows = ending.flows
        yield ending, flows[(index // len(ENDINGS)) % len(flows)]


class _RoundState:
    """The broker, series and proxy of a round."""

    def __init__(
        self, case: Round, broker: BrokerAdapter, series: Series, proxy: Proxy | None
    ) -> None:
        self.case = case
        self.broker = broker
        self.series = series
        self.proxy = proxy
        self.rng = case.rng
        #: Errors that a run's ending does not explain.
        self.unexpected_errors: list[str] = []
        self._workers: list[Worker] = []
        self._kill_position = case.rng.random()
        self._numbers = itertools.count(case.first + 1)

    def worker(self, index: int = 0) -> Worker:
        """Returns a worker process; starts it if necessary."""
        while len(self._workers) <= index:
            self._workers.append(Worker(self.case.folder / f"worker-{len(self._workers)}.log"))
        return self._workers[index]

    def kill(self, index: int = 0) -> None:
        """Kills a worker and starts its replacement; sometimes expires its leases."""
        self._workers[index].kill()
        self._workers[index] = Worker(self.case.folder / f"worker-{index}.log")
        if isinstance(self.broker, LeaseExpiring) and self.rng.random() < 0.5:
            self.broker.expire_leases()

    def close(self) -> None:
        """Kills all workers."""
        while self._workers:
            self._workers.pop().kill()

    def run_name(self) -> str:
        """Returns a new name for a run."""
        return f"run-{next(self._numbers)}"

    def start_run(self, plan: tuple[Ending, str], worker: Worker, **kwargs: Any) -> str:
        """Starts a run with a planned ending; returns its name."""
        ending, flow = plan
        # The runs are shorter than the age at which a queue is reliable, so skip that age unless
        # the broker is restarted.
        young = not SCENARIOS[self.case.scenario].restarts_broker
        faults = {
            "young_queues": young,
            "no_grace": True,
            **kwargs.pop("faults", {}),
            **ending.faults,
        }
        command = {
            "flow": flow,
            "budget": ending.budget,
            "producer": {**ending.producer, **kwargs.pop("producer", {})},
            "context": ending.context,
            "faults": faults,
            "run": kwargs.pop("run", None) or self.run_name(),
            **kwargs,
        }
        if ending.timeout:
            command["timeout"] = self.rng.uniform(0.1, 0.8)
        self.case.log(f"  {command['run']}: {ending.name}, {flow}, {self.case.scenario}")
        self.series.start_run(worker, **command)
        return str(command["run"])

    def next_kill(self, plan: tuple[Ending, str]) -> int:
        """Returns the number of the write before which the next run is killed."""
        self._kill_position = (self._kill_position + _STEP) % 1.0
        writes = _write_counts.get((self.broker.kind, plan[0].name, plan[1]), _WRITES)
        return 1 + int(self._kill_position * writes)

    def finish(self, plan: tuple[Ending, str], worker: Worker) -> dict[str, Any]:
        """Ends a run as planned and waits for its response."""
        if plan[0].signal_number is not None:
            time.sleep(self.rng.uniform(0.05, 0.8))
            while not worker.done:  # the first signal may precede the handler
                worker.signal(plan[0].signal_number)
                time.sleep(0.2)
        response = self.series.end(worker)
        _write_counts[self.broker.kind, plan[0].name, plan[1]] = response["writes"]
        if response["raised"] and not (
            plan[0].raises and response["raised"].startswith(plan[0].raises)
        ):
            self.unexpected_errors.append(
                f"{response['run']}, {plan[0].name}, raised {response['raised']}"
            )
        return response


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The faults during a round.

    :param run: Executes one run with its planned ending.
    :param exact: Whether the runs' reports must equal the counts.
    :param latency: One-way latency of a proxy in seconds; ``None``: no proxy.
    :param restarts_broker: Whether the server is killed.  Then RabbitMQ may forget acknowledgements
        of a classic queue that it has not written to disk.
    :param broker_type: The adapters with which the scenario works.
    """

    run: Callable[[_RoundState, tuple[Ending, str]], None]
    exact: bool = True
    latency: float | None = None
    restarts_broker: bool = False
    broker_type: type = object

    def is_supported(self, broker: type[BrokerAdapter]) -> bool:
        """Returns whether the scenario works with this adapter."""
        required = (
            self.broker_type,
            object if self.latency is None else Networked,
            Restartable if self.restarts_broker else object,
        )
        return all(issubclass(broker, kind) for kind in required)


def _run_one(faults: str) -> Callable[[_RoundState, tuple[Ending, str]], None]:
    """Returns a scenario of sequential runs with a delay."""

    def run(state: _RoundState, plan: tuple[Ending, str]) -> None:
        worker = state.worker()
        state.start_run(plan, worker, faults=DELAYS[faults])
        state.finish(plan, worker)

    return run


def _run_with_stalls(state: _RoundState, plan: tuple[Ending, str]) -> None:
    """Stalls the network during a run, for less than any timeout."""
    worker = state.worker()
    state.start_run(plan, worker)
    if state.proxy is not None:
        time.sleep(state.rng.uniform(0.0, 0.6))
        state.proxy.stall()
        time.sleep(state.rng.uniform(0.2, 1.2))
        state.proxy.resume()
    state.finish(plan, worker)


def _run_with_broken_connections(faults: str) -> Callable[[_RoundState, tuple[Ending, str]], None]:
    """Returns a scenario that cuts or half-closes all connections three times in a run."""

    def run(state: _RoundState, plan: tuple[Ending, str]) -> None:
        worker = state.worker()
        state.start_run(plan, worker)
        for _ in range(3):
            time.sleep(state.rng.uniform(0.1, 0.7))
            getattr(state.proxy, faults)()
        state.finish(plan, worker)

    return run


def _run_two(state: _RoundState, plan: tuple[Ending, str]) -> None:
    """Runs two runs concurrently; both know that the other is running."""
    one, two = state.worker(0), state.worker(1)
    names = [state.run_name(), state.run_name()]
    other = (ENDINGS[0], plan[1])
    state.start_run(plan, one, run=names[0], running=names)
    state.start_run(other, two, run=names[1], running=names)
    state.finish(plan, one)
    state.finish(other, two)


def _kill_run(state: _RoundState, plan: tuple[Ending, str]) -> None:
    """Kills a run at a random time; the next run or the lease's deadline releases its messages."""
    state.start_run(plan, state.worker())
    time.sleep(state.rng.uniform(0.2, 2.5))
    state.kill()


def _kill_at_write(state: _RoundState, plan: tuple[Ending, str]) -> None:
    """Kills a run before a write: to a file, to the broker, or a commit."""
    worker = state.worker()
    state.start_run(plan, worker, faults={"freeze_at_any": state.next_kill(plan)})
    if plan[0].signal_number is not None:
        time.sleep(state.rng.uniform(0.3, 0.8))
        worker.signal(plan[0].signal_number)
    if worker.wait_until_stopped():
        state.kill()
    else:
        state.finish(plan, worker)


def _restart_broker(state: _RoundState, plan: tuple[Ending, str]) -> None:
    """Kills and restarts the broker's server during a run."""
    assert isinstance(state.broker, Restartable)
    worker = state.worker()
    state.start_run(plan, worker)
    # Before, during and after the wait for reliable queues.
    time.sleep(state.rng.uniform(0.1, 5.0))
    state.broker.restart()
    state.finish(plan, worker)


def _settle_twice(state: _RoundState, plan: tuple[Ending, str]) -> None:
    """Stops a process at a write, lets another process settle its run, and resumes it."""
    one, two = state.worker(0), state.worker(1)
    plan = (plan[0], "staged")
    faults = {**DELAYS["quick"], "freeze_at": state.rng.randint(5, 30)}
    run_name = state.start_run(plan, one, faults=faults)
    if one.wait_until_stopped():
        state.series.run(two, run=run_name, flow="ack")
        state.start_run((ENDINGS[0], "staged"), two, running=[run_name])
        state.series.end(two)
        one.signal(signal.SIGCONT)
    state.finish(plan, one)


def _resume_after_expiry(state: _RoundState, plan: tuple[Ending, str]) -> None:
    """Stops a process for longer than its lease, lets another run take over, and resumes it."""
    one, two = state.worker(0), state.worker(1)
    lease = {"lease": _SHORT}
    run_name = state.start_run(plan, one, producer=lease)
    time.sleep(state.rng.uniform(0.1, 0.8))
    one.signal(signal.SIGSTOP)
    while not state.broker.is_unlocked():  # the stopped process holds a lock
        one.signal(signal.SIGCONT)
        time.sleep(0.01)
        one.signal(signal.SIGSTOP)
    time.sleep(_SHORT + 0.5)
    state.start_run((ENDINGS[0], plan[1]), two, producer=lease, running=[run_name])
    state.series.end(two)
    one.signal(signal.SIGCONT)
    state.finish(plan, one)


SCENARIOS = {
    "calm": Scenario(run=_run_one("quick")),
    "slow_staging": Scenario(run=_run_one("slow_staging")),
    "slow_journal": Scenario(run=_run_one("slow_journal")),
    "far_away": Scenario(run=_run_one("quick"), latency=0.04),
    "stalls": Scenario(run=_run_with_stalls, latency=0.0),
    "cut": Scenario(
        run=_run_with_broken_connections("cut"),
        exact=False,
        latency=0.0,
        broker_type=RabbitMQTraffic,
    ),
    "half_closed": Scenario(
        run=_run_with_broken_connections("half_close"),
        exact=False,
        latency=0.0,
        broker_type=RabbitMQTraffic,
    ),
    "two_at_once": Scenario(run=_run_two),
    "killed": Scenario(run=_kill_run, exact=False),
    "killed_at_writes": Scenario(run=_kill_at_write, exact=False),
    "broker_dies": Scenario(run=_restart_broker, exact=False, restarts_broker=True),
    "settled_twice": Scenario(run=_settle_twice, exact=False),
    "zombies": Scenario(run=_resume_after_expiry, exact=False),
}


def scenarios_for(broker: type[BrokerAdapter]) -> list[str]:
    """Returns the names of the scenarios that work with this adapter."""
    return [run_name for run_name, scenario in SCENARIOS.items() if scenario.is_supported(broker)]
