"""kill -9 of whoever receives or settles at Kafka, at random instants: nothing lost, order kept."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from airflow_broadway.core.custody.verdicts import Action, Verdict
from scripts.airflow_env import ROOT
from tests.faults.kafka_worker import GROUP, PAUSE_AT, PAUSED, verdict_in_order, verdict_on
from tests.kafka_server import KafkaServer
from tests.waiting import eventually

pytestmark = [pytest.mark.faults, pytest.mark.broker]

PARTITIONS = 3
#: Messages of a key, which follow each other in one partition.
KEYED = 20


class Handled(NamedTuple):
    """One message of one execution that came to publish what it had done."""

    number: int
    attempt: int
    redelivered: bool


@dataclass(frozen=True)
class Topic:
    """A topic of numbers, and the runs on it.

    :param order: The producer's option.
    :param count: How many messages.
    """

    kafka: KafkaServer
    name: str
    folder: Path
    order: str
    count: int

    @classmethod
    def filled(cls, kafka: KafkaServer, folder: Path, order: str, count: int) -> Topic:
        """Messages of one key go to one partition, in order."""
        name = kafka.topic(partitions=PARTITIONS)
        kafka.topic(f"{name}-dlt")
        if order == "none":
            kafka.topic(f"{name}.retry")
        producer = kafka.producer({"linger.ms": 5, "queue.buffering.max.messages": 200_000})
        for number in range(count):
            key = number // KEYED
            producer.produce(name, b"%d" % number, b"%d" % key, key % PARTITIONS)
        assert not producer.flush(60)
        folder.mkdir(parents=True, exist_ok=True)
        return cls(kafka, name, folder, order, count)

    @property
    def verdict_on(self) -> Callable[[int, int], Verdict]:
        return verdict_on if self.order == "none" else verdict_in_order

    def group_of(self, number: int) -> int | None:
        """Within what the message stays in order."""
        key = number // KEYED
        return {"none": None, "partition": key % PARTITIONS, "key": key}[self.order]

    # -- the runs ------------------------------------------------------------------------------

    def worker(self, most: int) -> subprocess.Popen[bytes]:
        """A worker, once it is at work."""
        said = self.folder / f"worker-{time.time_ns()}.log"
        with said.open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.faults.kafka_worker", str(self.folder)),
                    *(self.kafka.bootstrap, self.name, self.order, str(most)),
                ],
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
        while not said.stat().st_size and process.poll() is None:
            time.sleep(0.01)
        return process

    def drain(self, *, kills: int, most: int, seed: int) -> int:
        """Kill workers, then let one finish; how many were killed.

        One of three dies between two receives of a run, one some runs later, as it takes more or
        settles, and one at any instant.
        """
        dice, killed = random.Random(seed), 0
        pause_at = self.folder / PAUSE_AT
        for number in range(kills):
            if number % 3 == 1:
                pause_at.write_text(str(dice.randint(1, 5)))
            else:
                pause_at.unlink(missing_ok=True)
            worker = self.worker(most)
            try:
                if number % 3 == 1:
                    self._wait_until_paused(worker)
                elif number % 3 == 2:
                    self._wait_until_it_takes(worker, runs=dice.randint(1, 4))
                worker.wait(timeout=(1.6, 0.0, 0.3)[number % 3] * dice.random())
            except subprocess.TimeoutExpired:
                killed += 1
            finally:
                worker.kill()
                worker.wait()
        pause_at.unlink(missing_ok=True)
        assert self.worker(most).wait(timeout=600) == 0
        return killed

    def _wait_until_paused(self, worker: subprocess.Popen[bytes]) -> None:
        wanted = len(self.runs(PAUSED)) + 1
        eventually(lambda: worker.poll() is not None or len(self.runs(PAUSED)) >= wanted)

    def _wait_until_it_takes(self, worker: subprocess.Popen[bytes], *, runs: int) -> None:
        wanted = len(self.runs("taken")) + runs
        eventually(lambda: worker.poll() is not None or len(self.runs("taken")) >= wanted)

    def runs(self, having: str) -> set[Path]:
        """The executions that have written a file."""
        return {path.parent for path in self.folder.glob(f"runs/*/{having}")}

    def abandoned(self) -> int:
        """How many executions took messages and said nothing more."""
        return len(self.runs("taken") - self.runs("manifest.json"))

    # -- what came of it -----------------------------------------------------------------------

    def executions(self) -> list[list[Handled]]:
        """What each execution has published, in the order of publishing."""
        manifests = sorted(
            self.folder.glob("runs/*/manifest.json"), key=lambda path: path.stat().st_mtime_ns
        )
        return [
            [
                Handled(int(b64decode(payload)), attempt, redelivered)
                for _, attempt, redelivered, payload, *_ in json.loads(path.read_text())["messages"]
            ]
            for path in manifests
        ]

    def handled(self) -> Iterator[Handled]:
        return (each for execution in self.executions() for each in execution)

    def taken(self) -> Iterator[Handled]:
        """What each execution has taken, those among them that were killed."""
        for path in self.folder.glob("runs/*/taken"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # else it was killed as it wrote
                    number, attempt, redelivered = map(int, line.split())
                    yield Handled(number, attempt, bool(redelivered))

    def is_final(self, each: Handled) -> bool:
        """Whether its verdict ends it."""
        return self.verdict_on(each.number, each.attempt).action is not Action.RETRY

    def check(self) -> None:
        """Nothing is lost; what was handled again at the same attempt says so; Kafka knows."""
        marks: dict[tuple[int, int], list[bool]] = defaultdict(list)
        for each in self.handled():
            marks[each.number, each.attempt].append(each.redelivered)
        done = {
            number for number, attempt in marks if self.is_final(Handled(number, attempt, True))
        }
        assert done == set(range(self.count))
        assert [key for key, marked in marks.items() if marked.count(False) > 1] == []
        # A kill uses up no attempt.
        fails = {n for n in done if self.verdict_on(n, 1).action is Action.RETRY}
        assert {n for n, attempt in marks if attempt > 1 + (n in fails)} == set()
        ends = {partition: end for partition, (_, end) in self.kafka.watermarks(self.name).items()}
        committed = self.kafka.committed(GROUP, self.name)
        assert {partition: offset for partition, (offset, _) in committed.items()} == ends
        if self.order == "none":
            assert self.kafka.lag(GROUP, f"{self.name}.retry") == 0
        self._check_dead_letters()
        self._check_order()

    def _check_dead_letters(self) -> None:
        letters: dict[int, list[bool]] = defaultdict(list)
        for message in self.kafka.read(f"{self.name}-dlt"):
            again = dict(message.headers() or [])["broadway.again"] == b"1"
            letters[int(message.value() or b"")].append(again)
        assert sorted(letters) == [
            n for n in range(self.count) if self.verdict_on(n, 2).action is Action.DEAD_LETTER
        ]
        assert [n for n, again in letters.items() if again.count(False) > 1] == []

    def _check_order(self) -> None:
        ended: dict[int, list[int]] = defaultdict(list)
        for each in self.handled():
            group = self.group_of(each.number)
            if group is None:
                continue
            seen = ended[group]
            # Nobody overtakes: all before it in its group were handled to their end before it
            # itself is for the last time.
            while seen and seen[-1] >= each.number:
                seen.pop()
            if self.is_final(each):
                seen.append(each.number)
        everything = Counter(map(self.group_of, range(self.count)))
        assert all(seen == sorted(seen) for seen in ended.values())
        assert {group: len(seen) for group, seen in ended.items()} == {
            group: count for group, count in everything.items() if group is not None
        }


@pytest.mark.parametrize(
    "order",
    # What nothing depends on is killed in the contract suite, too.
    [pytest.param("none", marks=pytest.mark.slow), "key", "partition"],
)
def test_whoever_is_killed_nothing_is_lost_and_order_is_kept(kafka, tmp_path, order):
    topic = Topic.filled(kafka, tmp_path, order, 600)

    assert topic.drain(kills=4, most=200, seed=3)
    assert topic.abandoned()

    topic.check()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("order", ["none", "partition", "key"])
def test_twenty_thousand_survive_sixty_kills(kafka, tmp_path, order):
    topic = Topic.filled(kafka, tmp_path, order, 20_000)

    assert topic.drain(kills=75, most=200, seed=60) >= 60
    assert topic.abandoned() >= 15

    topic.check()
