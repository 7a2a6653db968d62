"""``make race``: queues drained into Parquet files by a loop, by other libraries, by us.

Each peer runs as a child process on the same two cores as its broker.  ``--messages`` for
RabbitMQ and Kafka; moto's SQS is slow and gets a fiftieth, but 2,000.  ``--only`` names peers or
brokers; ``--write`` writes ``docs/race.md`` with its plot.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.figures import temporary_folder
from tests.nothing_left import nothing_left_behind
from tests.race import page
from tests.race.brokers import Broker, Kafka, RabbitMQ, Sqs
from tests.race.passes import JARS, ROOT, CleanPass, Lane, Peer, PeerError

OURS = "airflow-broadway"
#: The results by broker; a race of some brokers keeps those of the others.
RESULT = ROOT / "build" / "race.json"
BROKERS: dict[str, Callable[[Path], Broker]] = {"rabbitmq": RabbitMQ, "kafka": Kafka, "sqs": Sqs}

PEERS = [
    Peer(**entry)
    for entry in tomllib.loads(Path(__file__).with_name("peers.toml").read_text("utf-8"))["peer"]
]


class Race:
    """The peers of one broker.

    :param left_out: Receives a reason for each peer that does not work here.
    """

    def __init__(self, broker: Broker, folder: Path, seed: int, left_out: dict[str, str]) -> None:
        self._broker, self._folder, self._seed = broker, folder, seed
        self._left_out = left_out

    def run(
        self, peers: list[Peer], messages: int, tries: int, kills: int, *, pace: bool = True
    ) -> list[page.Row]:
        """Runs all passes; tries of different peers take turns."""
        lanes = [lane for peer in peers if (lane := self._lane(peer)) is not None]
        passes: dict[str, list[CleanPass]] = {lane.peer.name: [] for lane in lanes}
        figures: list[page.Row] = []
        for _ in range(tries):
            for lane in list(lanes):
                if (clean := self._try(lane, lanes, lambda lane: lane.clean(messages))) is not None:
                    passes[lane.peer.name].append(clean)
        for lane in list(lanes):
            tried = passes[lane.peer.name]
            last = tried[-1]
            counted = self._try(lane, lanes, lambda lane: lane.killed(messages, last, kills))  # noqa: B023
            waits = self._try(lane, lanes, Lane.paced) if pace and counted is not None else [0.0]
            if counted is None or waits is None:
                continue
            seconds = median(clean.seconds for clean in tried)
            loop = next(peer.name for peer in PEERS if peer.broker == lane.peer.broker)
            loop_passes = passes.get(loop, [])
            ratios = [b.seconds / a.seconds for a, b in zip(tried, loop_passes, strict=False)]
            fields = ("name", "broker", "version", "settings", "lines")
            row = {
                **{name: getattr(lane.peer, name) for name in fields},
                "rate": round(messages / seconds),
                "ratio": round(median(ratios), 2) if ratios else None,
                "cpu": round(median(clean.cpu for clean in tried) * 1e6 / messages, 1),
                "p50": round(waits[len(waits) // 2], 2),
                "p99": round(waits[int(len(waits) * 0.99)], 2),
                "kills": lane.kills,
                "lost": counted.lost + sum(clean.lost for clean in tried),
                "doubled": counted.doubled + sum(clean.doubled for clean in tried),
            }
            figures.append(row)
            print(page.line(row), flush=True)
        return figures

    def _lane(self, peer: Peer) -> Lane | None:
        if not peer.python.exists():
            self._left_out[peer.name] = "it is not installed: build/setup/race.log"
            return None
        if peer.package == "pyspark" and not JARS.exists():
            self._left_out[peer.name] = "Maven could not resolve its connector for Kafka"
            return None
        name = "".join(char if char.isalnum() else "-" for char in peer.name)
        folder = self._folder / f"{peer.broker}-{name}"
        lane = Lane(peer, self._broker, folder, random.Random(f"{self._seed} {peer.name}"))
        return lane if self._try(lane, [lane], Lane.prepare) else None

    def _try(self, lane: Lane, lanes: list[Lane], work: Callable[[Lane], Any]) -> Any:
        """Runs work on a lane; a peer that fails is left out from now on."""
        try:
            return work(lane)
        except PeerError as error:
            self._left_out[f"{lane.peer.name} ({lane.peer.broker})"] = str(error)
            lanes.remove(lane)
            print(f"{lane.peer.name} is left out: {error}", file=sys.stderr, flush=True)
            return None


def main() -> int:
    """Runs the race; 1 if a row of this package's task group is lost or doubled."""
    parser = argparse.ArgumentParser(prog="make race", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="of RabbitMQ and Kafka")
    parser.add_argument("--tries", type=int, default=3, help="passes without kills; medians count")
    parser.add_argument("--kills", type=int, default=5, help="at most, of each peer")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the kills")
    parser.add_argument("--only", default="", help="names of peers or brokers, with commas between")
    parser.add_argument("--write", action="store_true", help="write docs/race.md and its plot")
    args = parser.parse_args()
    chosen = [name.strip() for name in args.only.split(",") if name.strip()]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    print(page.HEAD)
    lossless = True
    for name, start in BROKERS.items():
        peers = [
            peer
            for peer in PEERS
            if peer.broker == name and (not chosen or {peer.name, name} & set(chosen))
        ]
        if not peers:
            continue
        count = args.messages
        if name == "sqs":
            count = min(count, max(count // 50, 2_000))
        left_out: dict[str, str] = {}
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_folder())
            broker = start(folder / "broker")
            stack.callback(broker.stop)
            race = Race(broker, folder, args.seed, left_out)
            figures = race.run(peers, count, args.tries, args.kills)
        results[name] = {
            "at": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "load": round(os.getloadavg()[2], 1),
            "messages": count,
            "tries": args.tries,
            "kills": args.kills,
            "seed": args.seed,
            "figures": figures,
            "left_out": left_out,
        }
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(results, indent=1) + "\n")
        if args.write:
            page.write(results, ROOT / "docs")
        ours = [row for row in figures if row["name"] == OURS]
        expected = any(peer.name == OURS for peer in peers)
        lossless &= not any(row["lost"] or row["doubled"] for row in ours)
        lossless &= bool(ours) or not expected  # left out is no success
    return 0 if lossless else 1


if __name__ == "__main__":
    with nothing_left_behind():
        sys.exit(main())
