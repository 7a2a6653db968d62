"""What the files of the workers and the broker's queues say together, when all is over."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pika

from airflow_broadway.core.custody import ACK, Action
from airflow_broadway.producers.rabbitmq.queues import Queues
from tests.faults.rabbitmq_worker import verdict_on

__all__ = ["Proxy", "Truth", "depth", "fill", "spawn", "truth"]


def fill(url: str, queue: str, count: int, *, kind: str = "classic", **arguments: Any) -> None:
    """A new queue with so many numbers."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind, **arguments})
        for number in range(count):
            channel.basic_publish(
                "", queue, str(number).encode(), pika.BasicProperties(delivery_mode=2)
            )
        while channel.queue_declare(queue, passive=True).method.message_count < count:
            time.sleep(0.05)


def depth(url: str, queue: str) -> int | None:
    """Messages in a queue; ``None`` without it."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        try:
            declared = connection.channel().queue_declare(queue, passive=True)
        except pika.exceptions.ChannelClosedByBroker:
            return None
        return int(declared.method.message_count)


def spawn(folder: Path, uri: str, queue: str, lease: float, most: int) -> subprocess.Popen[bytes]:
    """A worker, once it is at work; what it says is in ``worker-*.log``."""
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / f"worker-{time.time_ns()}.log"
    with said.open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.faults.rabbitmq_worker"),
                *(str(folder), uri, queue, str(lease), str(most)),
            ],
            stdout=log,
            stderr=log,
            cwd=Path(__file__).resolve().parents[2],
        )
    while not said.stat().st_size and process.poll() is None:
        time.sleep(0.01)
    return process


def kill_now_and_then(
    folder: Path, uri: str, queue: str, *, lease: float, most: int, kills: int, seed: int
) -> None:
    """Kill workers at random instants, then let one finish."""
    dice = random.Random(seed)
    for _ in range(kills):
        worker = spawn(folder, uri, queue, lease, most)
        try:
            worker.wait(timeout=dice.uniform(0.05, 1.2))
        except subprocess.TimeoutExpired:
            worker.send_signal(signal.SIGKILL)
            worker.wait()
    finish(folder, uri, queue, lease=lease, most=most)


def finish(folder: Path, uri: str, queue: str, *, lease: float, most: int) -> None:
    """Run workers until the queue stays empty, leases that must lapse included."""
    assert spawn(folder, uri, queue, lease, most).wait(timeout=240) == 0


@dataclass
class Truth:
    """What became of every number."""

    lost: list[int] = field(default_factory=list)
    duplicates: int = 0
    unmarked: list[int] = field(default_factory=list)
    dead: int = 0
    left_over: dict[str, int] = field(default_factory=dict)


def truth(folder: Path, url: str, queue: str, count: int) -> Truth:
    """Count everything."""
    handled: dict[tuple[int, int], list[bool]] = defaultdict(list)
    done: set[int] = set()
    for place in folder.glob("runs/*"):
        if not (place / "manifest.json").exists():
            continue
        manifest = json.loads((place / "manifest.json").read_text())
        for _, attempt, redelivered, payload, _ in manifest["messages"]:
            number = int(b64decode(payload))
            handled[number, attempt].append(redelivered)
            if verdict_on(number, attempt).action in (ACK.action, Action.DEAD_LETTER):
                done.add(number)
    queues = Queues(queue)
    found = Truth(lost=[number for number in range(count) if number not in done])
    for (number, _), marks in handled.items():
        found.duplicates += len(marks) - 1
        if sum(not mark for mark in marks) > 1:
            found.unmarked.append(number)
    found.dead = depth(url, queues.dead) or 0
    for name in (queue, queues.returns):
        found.left_over[name] = depth(url, name) or 0
    return found


class Proxy:
    """Between a client and its broker: cuts, stalls and half-closes connections."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._gate = threading.Event()
        self._gate.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Drop every connection."""
        self._gate.set()
        for pair in self._pairs:
            for each in pair:
                each.close() if each.fileno() >= 0 else None
        self._pairs.clear()

    def stall(self) -> None:
        """Let nothing through."""
        self._gate.clear()

    def go_on(self) -> None:
        """Let everything through."""
        self._gate.set()

    def half_close(self) -> None:
        """End what the clients send, and go on with what they are sent."""
        for _, broker in list(self._pairs):
            try:
                broker.shutdown(socket.SHUT_WR)
            except OSError:
                continue

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                broker = socket.create_connection(self._target)
            except OSError:
                return
            self._pairs.append((client, broker))
            for source, target in ((client, broker), (broker, client)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._gate.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            target.close()
