"""One peer: started, killed and restarted as a child process, and observed from outside."""

from __future__ import annotations

import ast
import json
import math
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from airflow_broadway.core.model.connections import VARIABLE
from scripts.count_code import count_code
from tests.race.brokers import WRAPS, Broker
from tests.race.counting import RowCounts, Rows, count_rows
from tests.sqs_server import KEY, REGION

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).parent / "peers"
#: The environment of peers that the project does not depend on.
VENV = ROOT / "build" / "race" / ".venv"
#: Spark's connector for Kafka.
JARS = ROOT / "build" / "spark-kafka"

#: Seconds without a new row, and without an acknowledgement, after which a peer has failed.
PATIENCE = 240.0
#: Seconds without a new row after which a drained queue means that rows are lost.
SETTLED = 3.0
#: The paced pass: messages per second, and seconds.
RATE, SECONDS = 200, 10


class Peer(NamedTuple):
    """One way to bring messages into rows; see ``peers.toml``."""

    name: str
    broker: str
    package: str
    files: list[str]
    command: str = ""
    ours: bool = False
    wrap: str = "plain"
    reports_backlog: bool = True

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.ours else VENV / "bin" / "python"

    @property
    def version(self) -> str:
        """The release of its package."""
        text = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        return subprocess.check_output([self.python, "-c", text], text=True).strip()

    @property
    def settings(self) -> str:
        """How it is configured."""
        source = (PEERS / self.files[0]).read_text("utf-8")
        return " ".join((ast.get_docstring(ast.parse(source)) or "").split())

    @property
    def lines(self) -> int:
        """The code lines of its user."""
        return sum(count_code((PEERS / name).read_text("utf-8")) for name in self.files)


class CleanPass(NamedTuple):
    """A pass without kills.

    :param seconds: From the start of the peer until the queue was empty and all rows were visible.
    :param first: Seconds until the first row was visible.
    :param cpu: Seconds of processor time of all its processes.
    """

    seconds: float
    first: float
    cpu: float
    lost: int
    doubled: int


class PeerError(Exception):
    """A peer does not work here."""


@dataclass
class Lane:
    """One peer's queue, folder of rows, and state.

    :param kills: The kills so far.
    """

    peer: Peer
    broker: Broker
    folder: Path
    random: random.Random
    sent: int = 0
    kills: int = 0
    process: psutil.Popen | None = None
    seen: set[Path] = field(default_factory=set)
    base: int = 0
    first: float = 0.0
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.queue = f"race-{self.folder.name}"
        self.rows = Rows(self.folder / "rows")
        for name in ("rows", "state"):
            (self.folder / name).mkdir(parents=True)

    # -- the child process ---------------------------------------------------------------------

    def start(self) -> None:
        """Starts the peer."""
        program, *arguments = shlex.split(self.peer.command or f"python {self.peer.files[0]}")
        command = [str(self.peer.python.parent / program), *arguments]
        path = [str(PEERS), str(ROOT)] if self.peer.ours else [str(PEERS)]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "RACE_BROKER": self.peer.broker,
            "RACE_URL": self.broker.url,
            "RACE_QUEUE": self.queue,
            "RACE_FOLDER": str(self.rows.folder),
            "RACE_STATE": str(self.folder / "state"),
            "RACE_JARS": str(JARS / "*.jar"),
            "AWS_DEFAULT_REGION": REGION,
            **{name.upper(): value for name, value in KEY.items()},
            "AIRFLOW_CONN_RACE": json.dumps(self.broker.connection),
            VARIABLE: json.dumps({"race": {"conn_id": "race", **self.broker.connection}}),
        }
        with (self.folder / "log").open("ab") as log:
            self.process = psutil.Popen(
                command, cwd=PEERS, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends the peer with all its processes; kills those that are left after ten seconds."""
        process, self.process = self.process, None
        if process is None:
            return
        family = [process, *_children(process)]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        _, left = psutil.wait_procs(family, timeout=10)
        for survivor in left:
            with suppress(psutil.NoSuchProcess):
                survivor.kill()
        process.wait()

    def cpu(self) -> float:
        """Returns the seconds of processor time of the running peer, with all its processes."""
        assert self.process is not None
        total = 0.0
        for process in (self.process, *_children(self.process)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    @contextmanager
    def running(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    # -- passes --------------------------------------------------------------------------------

    def begin(self, count: int, rate: float = 0.0) -> None:
        """Begins a pass: sends the next messages, whose rows are counted from now on.

        :param rate: Messages per second; 0 for no limit.
        """
        self.seen = set(self.rows.files())
        self.base = self.sent
        self.sent += count
        numbers = range(self.base, self.sent)
        self.broker.send(
            self.queue, paced(numbers, rate) if rate else numbers, WRAPS[self.peer.wrap]
        )

    def drain(self, count: int, until: float = math.inf) -> bool:
        """Waits until the queue is empty and its rows are visible; returns whether in time.

        :param until: The time limit, by the monotonic clock.
        :raises PeerError: If nothing happens for a long time, or the peer has ended.
        """
        began = changed = time.monotonic()
        self.first, self.ended, last = 0.0, 0.0, (0, 0)
        while (now := time.monotonic()) < until:
            rows, left = self.rows.count(self.seen), 0
            if self.peer.reports_backlog and (rows >= count or now - changed > 1):
                left = self.broker.left(self.queue)
            if (rows, left) != last:
                last, changed = (rows, left), now
            if rows and not self.first:
                self.first = now - began
            # The brokers' counts are up to half a second old.
            drained = not left and now - changed > 1
            final = now - changed > (SETTLED if self.peer.reports_backlog else PATIENCE - 1)
            if drained and (final or not self.count(count).lost):
                self.ended = changed
                return True
            self.check(now - changed < PATIENCE, f"{rows:,} of {count:,} rows, and then none")
            time.sleep(0.1)
        return False

    def check(self, good: bool, reason: str) -> None:
        """Checks that the peer runs.

        :raises PeerError: If it has ended, or for the reason if it is not good.
        """
        assert self.process is not None
        if self.process.poll() is not None:
            raise PeerError(f"it ended with {self.process.returncode}: {self.tail()}")
        if not good:
            raise PeerError(f"{reason} for {PATIENCE:g} s: {self.tail()}")

    def count(self, sent: int) -> RowCounts:
        """Counts the rows of this pass."""
        try:
            return count_rows((n - self.base for n in self.rows.numbers(self.seen)), sent)
        except ValueError as error:  # of an earlier pass
            raise PeerError(str(error)) from error

    def tail(self) -> str:
        """Returns the last line of its log."""
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "it logs nothing"

    def prepare(self) -> Lane:
        """Lets the peer declare what it needs, and handle one message; returns this lane."""
        with self.running():
            end = time.monotonic() + PATIENCE
            while not self.broker.has(self.queue):
                self.check(time.monotonic() < end, "its queue was not declared")
                time.sleep(0.1)
            self.begin(1)
            self.drain(1)
        return self

    def clean(self, count: int) -> CleanPass:
        """Runs a pass without kills."""
        self.begin(count)
        began = time.monotonic()
        with self.running():
            self.drain(count)
            cpu = self.cpu()
        return CleanPass(self.ended - began, self.first, cpu, *self.count(count))

    def killed(self, count: int, clean: CleanPass, kills: int) -> RowCounts:
        """Runs a pass with at most so many ``kill -9``, each at a random time of a life.

        On average, a life does ``1 / (kills + 1)`` of the work: some is left for the last one.
        """
        self.begin(count)
        longest = clean.first + (clean.seconds - clean.first) * 2 / (kills + 1)
        for number in range(kills + 1):
            self.start()
            life = self.random.uniform(clean.first / 2, longest)
            drained = False
            try:
                end = time.monotonic() + life if number < kills else math.inf
                drained = self.drain(count, end)
            finally:
                self.stop(signal.SIGTERM if drained else signal.SIGKILL)
            if drained:
                break
            self.kills += 1
        return self.count(count)

    def paced(self) -> list[float]:
        """Runs a pass at a modest rate; returns the seconds from sent to row, sorted."""
        with self.running():
            self.begin(1)
            self.drain(1)
            self.begin(RATE * SECONDS, RATE)
            self.drain(RATE * SECONDS)
        return self.rows.latencies(self.seen)


def paced(numbers: Iterable[int], rate: float) -> Iterator[int]:
    """Yields numbers, so many per second."""
    began = time.monotonic()
    for place, number in enumerate(numbers):
        time.sleep(max(0.0, began + place / rate - time.monotonic()))
        yield number


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
