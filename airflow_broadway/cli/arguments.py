"""The arguments of the commands that look after brokers."""

from __future__ import annotations

import argparse
import logging
from datetime import datetime
from typing import Any

from airflow_broadway.cli.output import logging_at

#: Seconds after which a broker's silence is an answer.
DEPTH_SECONDS = 15.0


def command(commands: Any, name: str, text: str, handler: Any) -> argparse.ArgumentParser:
    """A parser of one command; its ``handler`` carries it out."""
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    made.set_defaults(handler=handler)
    return made


def _add_conn_id(made: Any) -> None:
    made.add_argument(
        "--conn-id", metavar="ID", help="the Airflow connection; the pipeline's by default"
    )


def add_staging(made: Any) -> None:
    """The argument that names the staging root."""
    made.add_argument(
        "--staging", metavar="URI", help="the staging root; Airflow's [broadway] staging by default"
    )


def add_dead_letters(commands: Any) -> None:
    """The arguments of ``dead-letters``."""
    text = "Look at a pipeline's dead letters, send them back, delete them."
    letters = commands.add_parser("dead-letters", help=text, description=text, allow_abbrev=False)
    actions = letters.add_subparsers(metavar="ACTION", required=True)
    for name, text in (
        ("list", "List them, about in order of their death; they stay where they are."),
        ("show", "Show some whole: why they died, their properties and payload."),
        ("requeue", "Send them back to the pipeline's source, on their first attempt."),
        ("delete", "Delete them for good."),
    ):
        made = command(actions, name, text, _dead_letters)
        made.set_defaults(action=name)
        made.add_argument(
            "--pipeline",
            action="append",
            required=True,
            metavar="REF",
            help="pkg.module:Class, or a reference as JSON",
        )
        made.add_argument(
            "--named",
            metavar="NAME",
            help="of several --pipeline that of this name",
        )
        _add_conn_id(made)
        add_staging(made)
        made.add_argument(
            "--place", metavar="NAME", help="the queue or topic, if it is not the pipeline's own"
        )
        made.add_argument(
            "--archive",
            action="store_true",
            help="what failed in runs of the archive and of past runs, and not the broker's",
        )
        if name == "show":
            made.add_argument("named_ids", nargs="*", metavar="MESSAGE_ID")
            made.add_argument(
                "--message-id",
                action="extend",
                nargs="+",
                default=[],
                metavar="ID",
                help="the same; --message-id=ID for one that begins with a dash",
            )
            made.add_argument(
                "--as",
                dest="format",
                choices=("text", "json", "hex"),
                default="text",
                help="how to print payloads; text by default",
            )
            made.add_argument(
                "--bytes",
                type=positive,
                metavar="N",
                help="of each payload, at most; 2,000 by default, all of them with --json",
            )
            continue
        which = made.add_argument_group("which; all that is given must apply")
        which.add_argument(
            "--message-id", action="extend", nargs="+", metavar="ID", help="those of these ids"
        )
        which.add_argument(
            "--reason", default="", metavar="TEXT", help="those whose reason contains it"
        )
        which.add_argument("--stage", default="", metavar="STAGE", help="those that failed in it")
        for option, text in (("--since", "from this instant on"), ("--until", "before it")):
            which.add_argument(
                option, type=_instant, metavar="INSTANT", help=f"those set aside {text}"
            )
        if name == "list":
            made.add_argument(
                "--limit", type=positive, default=100, metavar="N", help="100 by default"
            )
            made.add_argument(
                "--offset", type=int, default=0, metavar="N", help="leave out the first N"
            )
            made.add_argument(
                "--by-reason", action="store_true", help="how many there are of each reason, too"
            )
            made.add_argument(
                "--seconds", type=positive, metavar="N", help="look for so long, and no longer"
            )
        else:
            which.add_argument("--all", action="store_true", help="every one")
        if name == "requeue":
            made.add_argument(
                "--to",
                metavar="NAME",
                help="the queue or topic (Pub/Sub: the subscription) that they are sent to; the"
                " pipeline's own by default, never one that a letter names",
            )


def _dead_letters(given: argparse.Namespace) -> int:
    from airflow_broadway.cli.dead_letters import dead_letters

    # The error has what the broker's client logs.
    with logging_at(logging.CRITICAL):
        return dead_letters(given)


def _instant(text: str) -> datetime:
    """An instant with its time zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise argparse.ArgumentTypeError(
            "expected an instant with its time zone, such as 2026-01-31T12:00:00+00:00, got:"
            f" {text!r}"
        )
    return found


def add_check(commands: Any) -> None:
    """The arguments of ``check``."""
    made = command(
        commands,
        "check",
        "Check a pipeline's broker as its next run would: what that run would refuse, what it would"
        " warn of, what could not be checked.  No message is received, and nothing is changed.",
        _check,
    )
    made.add_argument("reference", metavar="REF", help="pkg.module:Class, or a reference as JSON")
    _add_conn_id(made)
    add_staging(made)


def _check(given: argparse.Namespace) -> int:
    from airflow_broadway.cli.check import check

    # The findings and the error have what the broker's client logs.
    with logging_at(logging.CRITICAL):
        return check(given)


def add_depth(commands: Any) -> None:
    """The arguments of ``depth``."""
    made = command(
        commands,
        "depth",
        "How many messages wait for pipelines at their brokers, and since when the oldest; none is"
        " taken.",
        _depth,
    )
    made.add_argument(
        "--pipeline",
        action="append",
        required=True,
        metavar="REF",
        help="pkg.module:Class, or a reference as JSON; may be repeated",
    )
    _add_conn_id(made)
    add_staging(made)
    made.add_argument(
        "--timeout",
        type=_seconds,
        default=DEPTH_SECONDS,
        metavar="S",
        help=f"seconds in which brokers are to answer; {DEPTH_SECONDS:g} by default",
    )


def _depth(given: argparse.Namespace) -> int:
    from airflow_broadway.cli.depth import depth

    # The result of each pipeline has what its broker's client logs.
    with logging_at(logging.CRITICAL):
        return depth(given)


def _seconds(text: str) -> float:
    """A number of seconds above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got: {text!r}")
    return seconds


def add_queue(commands: Any) -> None:
    """Adds the arguments of ``queue``."""
    text = "Create a queue of the embedded broker, and send messages to it."
    queue = commands.add_parser("queue", help=text, description=text, allow_abbrev=False)
    actions = queue.add_subparsers(metavar="ACTION", required=True)
    parsers = {}
    for name, text in (
        ("create", "Create an empty queue, and its file, unless they exist."),
        ("send", "Send the lines of a file, or of standard input, as messages."),
    ):
        parsers[name] = command(actions, name, text, _queue)
        parsers[name].set_defaults(action=name)
        file = parsers[name].add_mutually_exclusive_group(required=True)
        file.add_argument("--path", metavar="FILE", help="the queue file")
        file.add_argument("--conn-id", metavar="ID", help="the Airflow connection that names it")
        parsers[name].add_argument(
            "--queue", required=True, metavar="NAME", help="the queue's name"
        )
    parsers["send"].add_argument(
        "input", nargs="?", default="-", metavar="INPUT", help="- for stdin"
    )


def positive(text: str) -> int:
    """A number of at least 1, as an argument."""
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got: {text!r}")
    return int(text)


def _queue(given: argparse.Namespace) -> int:
    from airflow_broadway.cli.queue import queue

    return queue(given)


def add_archive(commands: Any) -> None:
    """The arguments of ``archive``."""
    text = "Look at what a pipeline has kept, take files in and out, remove hours of it."
    archive = commands.add_parser("archive", help=text, description=text, allow_abbrev=False)
    actions = archive.add_subparsers(metavar="ACTION", required=True)
    made = {}
    for name, text in (
        ("list", "How many messages there are, by day or hour."),
        ("show", "The messages of an interval, in order."),
        ("failed", "What failed in runs of it, or of past runs: why, and in which run."),
        ("import", "Put the rows of a file into it, all at once: Parquet, JSON lines or CSV."),
        ("export", "Write an interval to a file: Parquet or JSON lines."),
        ("purge", "Remove hours for good."),
    ):
        made[name] = command(actions, name, text, _archive)
        made[name].set_defaults(action=name)
        made[name].add_argument(
            "--pipeline-name", required=True, metavar="NAME", help="the pipeline's name"
        )
        add_staging(made[name])
        if name in ("import", "export"):
            made[name].add_argument("file", metavar="FILE")
        if name not in ("import", "failed"):
            for edge in ("start", "end"):
                made[name].add_argument(
                    f"--{edge}",
                    required=name != "list",
                    metavar="WHEN",
                    help="in ISO 8601; in UTC unless it says otherwise",
                )
    made["list"].add_argument("--hours", action="store_true", help="by hour, not by day")
    made["show"].add_argument(
        "--limit", type=positive, default=50, metavar="N", help="50 by default"
    )
    columns = made["import"].add_argument_group("columns of the file")
    columns.add_argument("--time", required=True, metavar="COLUMN", help="when it is to lie")
    columns.add_argument("--payload", metavar="COLUMN", help="the data; the row as JSON by default")
    columns.add_argument("--id", metavar="COLUMN", help="unique; made of file and row by default")
    made["import"].add_argument(
        "--format", choices=("parquet", "jsonl", "csv"), help="by the file's name by default"
    )
    made["purge"].add_argument("--yes", action="store_true", help="do it")


def _archive(given: argparse.Namespace) -> int:
    from airflow_broadway.cli.archive import archive

    with logging_at(logging.WARNING):
        return archive(given)
