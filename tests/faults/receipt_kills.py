"""Workers that are killed at random instants, and what they published: SQS's and Pub/Sub's."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from base64 import b64decode
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from airflow_broadway.core.custody.verdicts import Action
from scripts.airflow_env import ROOT
from tests.faults.rabbitmq_worker import verdict_on


class Handled(NamedTuple):
    """One message of one execution that came to publish what it had done."""

    number: int
    attempt: int
    redelivered: bool

    @property
    def final(self) -> bool:
        """Whether its verdict ends it."""
        return verdict_on(self.number, self.attempt).action is not Action.RETRY


class Workers(NamedTuple):
    """Processes at one queue.

    :param module: What each runs.
    :param arguments: What it is told, after its folder.
    :param env: Its environment, beside this one's.
    """

    folder: Path
    module: str
    arguments: Sequence[str]
    env: dict[str, str]

    def spawn(self) -> subprocess.Popen[bytes]:
        """A worker, once it is at work."""
        self.folder.mkdir(parents=True, exist_ok=True)
        said = self.folder / f"worker-{time.time_ns()}.log"
        with said.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(self.folder), *self.arguments],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **self.env},
            )
        while not said.stat().st_size and process.poll() is None:
            time.sleep(0.01)
        return process

    def kill_now_and_then(self, times: int, *, within: tuple[float, float], seed: int) -> int:
        """Kill workers at random instants, then let one finish; how many were killed.

        :param within: Seconds: the least and the most that one of them has.
        """
        dice, killed = random.Random(seed), 0
        for _ in range(times):
            worker = self.spawn()
            try:
                worker.wait(timeout=dice.uniform(*within))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
                killed += 1
        last = self.spawn()
        try:
            assert last.wait(timeout=300) == 0
        finally:
            last.kill()
        return killed


def executions(folder: Path) -> list[list[Handled]]:
    """What each execution has published, in the order of publishing."""
    manifests = sorted(folder.glob("runs/*/manifest.json"), key=lambda path: path.stat().st_mtime)
    return [
        [
            Handled(int(b64decode(payload)), attempt, redelivered)
            for _, attempt, redelivered, payload, *_ in json.loads(path.read_text())["messages"]
        ]
        for path in manifests
    ]


def ended(folder: Path) -> set[int]:
    """The numbers that some execution has published with a verdict that ends them."""
    return {each.number for execution in executions(folder) for each in execution if each.final}


def check_published(folder: Path, messages: int, left: Callable[[], Iterable[int]] = list) -> None:
    """Nothing is lost; what was handled again at the same attempt says so.

    :param left: The numbers that the queue still has, for who reads of a failure.
    """
    marks: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for each in (each for execution in executions(folder) for each in execution):
        marks[each.number, each.attempt].append(each.redelivered)
    missing = sorted(set(range(messages)) - ended(folder))
    if missing:
        there = set(missing) & set(left())
        pytest.fail(f"{len(missing)} came to no end, {len(there)} of them wait: {missing[:10]}")
    unmarked = [key for key, marked in marks.items() if marked.count(False) > 1]
    assert not unmarked, f"handled again without a mark: {unmarked[:10]}"
    # A kill uses up no attempt.
    more = sorted(number for number, attempt in marks if attempt > (2 if number % 3 == 0 else 1))
    assert not more, f"attempts that no failure used up: {more[:10]}"


def dead_letters_of(messages: int) -> list[int]:
    """The numbers that must be dead letters in the end."""
    return [n for n in range(messages) if verdict_on(n, 2).action is Action.DEAD_LETTER]


def check_order(folder: Path, messages: int, *, group: int) -> None:
    """Nobody overtakes: all before a message in its group of so many were handled to their end
    before it itself is for the last time.
    """
    ended: dict[int, list[int]] = defaultdict(list)
    for each in (each for execution in executions(folder) for each in execution):
        seen = ended[each.number // group]
        while seen and seen[-1] >= each.number:
            seen.pop()
        if each.final:
            seen.append(each.number)
    assert sorted(ended) == list(range(messages // group))
    for key, seen in ended.items():
        assert seen == list(range(key * group, (key + 1) * group))
