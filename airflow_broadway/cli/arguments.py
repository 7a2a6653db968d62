"""Arguments of the commands that access brokers and archives."""

from __future__ import annotations

import argparse
import logging
from datetime import datetime
from typing import Any

from airflow_broadway.cli.output import logging_at

#: Seconds before a broker counts as unresponsive.
DEPTH_SECONDS = 15.0


def command(commands: Any, name: str, text: str, handler: Any) -> argparse.ArgumentParser:
    """Adds the parser of one command; its ``handler`` runs it."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=handler)
    return parser


def _add_conn_id(parser: Any) -> None:
    parser.add_argument(
        "--conn-id", metavar="ID", help="the Airflow connection; the pipeline's by default"
    )


def add_staging(parser: Any) -> None:
    """Adds the argument of the staging root."""
    parser.add_argument(
        "--staging", metavar="URI", help="the staging root; Airflow's [broadway] staging by default"
    )


def add_dead_letters(commands: Any) -> None:
    """Adds the arguments of ``dead-letters``."""
    text = "List, show, requeue or delete a pipeline's dead letters."
    letters = commands.add_parser("dead-letters", help=text, description=text, allow_abbrev=False)
    actions = letters.add_subparsers(metavar="ACTION", required=True)
    for name, text in (
        ("list", "List them, roughly in order of dead-lettering; none is removed."),
        ("show", "Show some in full, with reason, properties and payload."),
        ("requeue", "Requeue them to the pipeline's source, as first attempts."),
        ("delete", "Delete them for good."),
    ):
        parser = command(actions, name, text, _dead_letters)
        parser.set_defaults(action=name)
        parser.add_argument(
            "--pipeline",
            action="append",
            required=True,
            metavar="REF",
            help="pkg.module:Class, or a reference as JSON",
        )
        parser.add_argument(
            "--named",
            metavar="NAME",
            help="the pipeline to use if --pipeline is repeated",
        )
        _add_conn_id(parser)
        add_staging(parser)
        parser.add_argument(
            "--place", metavar="NAME", help="the dead-letter queue or topic; default: its own"
        )
        parser.add_argument(
            "--archive",
            action="store_true",
            help="failures of archive runs and replays instead of the broker's dead letters",
        )
        if name == "show":
            parser.add_argument("named_ids", nargs="*", metavar="MESSAGE_ID")
            parser.add_argument(
                "--message-id",
                action="extend",
                nargs="+",
                default=[],
                metavar="ID",
                help="the same; use --message-id=ID for an id that begins with a dash",
            )
            parser.add_argument(
                "--as",
                dest="format",
                choices=("text", "json", "hex"),
                default="text",
                help="how to print payloads; text by default",
            )
            parser.add_argument(
                "--bytes",
                type=positive,
                metavar="N",
                help="bytes of each payload; 2,000 by default, all with --json",
            )
            continue
        filters = parser.add_argument_group("filters; combined with AND")
        filters.add_argument(
            "--message-id", action="extend", nargs="+", metavar="ID", help="of these ids"
        )
        filters.add_argument(
            "--reason", default="", metavar="TEXT", help="whose reason contains it"
        )
        filters.add_argument("--stage", default="", metavar="STAGE", help="of this stage")
        for option, text in (("--since", "at or after"), ("--until", "before")):
            filters.add_argument(
                option, type=_parse_timestamp, metavar="TIME", help=f"dead-lettered {text} it"
            )
        if name == "list":
            parser.add_argument(
                "--limit", type=positive, default=100, metavar="N", help="100 by default"
            )
            parser.add_argument(
                "--offset", type=int, default=0, metavar="N", help="skip the first N"
            )
            parser.add_argument(
                "--by-reason", action="store_true", help="also count them by reason"
            )
            parser.add_argument(
                "--seconds", type=positive, metavar="N", help="stop after N seconds"
            )
        else:
            filters.add_argument("--all", action="store_true", help="all dead letters")
        if name == "requeue":
            parser.add_argument(
                "--to",
                metavar="NAME",
                help="the target queue or topic (Pub/Sub: subscription); the pipeline's by"
                " default, never one named in a dead letter",
            )


def _dead_letters(args: argparse.Namespace) -> int:
    from airflow_broadway.cli.dead_letters import dead_letters

    # The error includes what the broker's client logs.
    with logging_at(logging.CRITICAL):
        return dead_letters(args)


def _parse_timestamp(text: str) -> datetime:
    """Parses a timestamp with a time zone."""
    try:
        timestamp = datetime.fromisoformat(text)
    except ValueError:
        timestamp = None
    if timestamp is None or timestamp.tzinfo is None:
        raise argparse.ArgumentTypeError(
            "expected a timestamp with its time zone, such as 2026-01-31T12:00:00+00:00, got:"
            f" {text!r}"
        )
    return timestamp


def add_check(commands: Any) -> None:
    """Adds the arguments of ``check``."""
    parser = command(
        commands,
        "check",
        "Check a pipeline's broker as its next run would; report errors, warnings and what could"
        " not be checked.  No message is received, and nothing is changed.",
        _check,
    )
    parser.add_argument("reference", metavar="REF", help="pkg.module:Class, or a reference as JSON")
    _add_conn_id(parser)
    add_staging(parser)


def _check(args: argparse.Namespace) -> int:
    from airflow_broadway.cli.check import check

    # The findings and the error include what the broker's client logs.
    with logging_at(logging.CRITICAL):
        return check(args)


def add_depth(commands: Any) -> None:
    """Adds the arguments of ``depth``."""
    parser = command(
        commands,
        "depth",
        "Report the queue depths of pipelines and the age of the oldest message; none is received.",
        _depth,
    )
    parser.add_argument(
        "--pipeline",
        action="append",
        required=True,
        metavar="REF",
        help="pkg.module:Class, or a reference as JSON; may be repeated",
    )
    _add_conn_id(parser)
    add_staging(parser)
    parser.add_argument(
        "--timeout",
        type=_parse_seconds,
        default=DEPTH_SECONDS,
        metavar="S",
        help=f"seconds before a broker counts as unresponsive; {DEPTH_SECONDS:g} by default",
    )


def _depth(args: argparse.Namespace) -> int:
    from airflow_broadway.cli.depth import depth

    # The result of each pipeline includes what its broker's client logs.
    with logging_at(logging.CRITICAL):
        return depth(args)


def _parse_seconds(text: str) -> float:
    """Parses a number of seconds above 0."""
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
    """Parses a number of at least 1."""
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got: {text!r}")
    return int(text)


def _queue(args: argparse.Namespace) -> int:
    from airflow_broadway.cli.queue import queue

    return queue(args)


def add_archive(commands: Any) -> None:
    """Adds the arguments of ``archive``."""
    text = "List, import, export or purge a pipeline's archived messages."
    archive = commands.add_parser("archive", help=text, description=text, allow_abbrev=False)
    actions = archive.add_subparsers(metavar="ACTION", required=True)
    parsers = {}
    for name, text in (
        ("list", "Count messages by day or hour."),
        ("show", "Show the messages of an interval, in order."),
        ("failed", "List failures of archive runs and replays, with reason and run."),
        ("import", "Import the rows of a file atomically: Parquet, JSON lines or CSV."),
        ("export", "Export an interval to a file: Parquet or JSON lines."),
        ("purge", "Remove hours for good."),
    ):
        parsers[name] = command(actions, name, text, _archive)
        parsers[name].set_defaults(action=name)
        parsers[name].add_argument(
            "--pipeline-name", required=True, metavar="NAME", help="the pipeline's name"
        )
        add_staging(parsers[name])
        if name in ("import", "export"):
            parsers[name].add_argument("file", metavar="FILE")
        if name not in ("import", "failed"):
            for edge in ("start", "end"):
                parsers[name].add_argument(
                    f"--{edge}",
                    required=name != "list",
                    metavar="WHEN",
                    help="in ISO 8601; UTC without an offset",
                )
    parsers["list"].add_argument("--hours", action="store_true", help="by hour, not by day")
    parsers["show"].add_argument(
        "--limit", type=positive, default=50, metavar="N", help="50 by default"
    )
    columns = parsers["import"].add_argument_group("columns of the file")
    columns.add_argument("--time", required=True, metavar="COLUMN", help="the message's time")
    columns.add_argument("--payload", metavar="COLUMN", help="data; the row as JSON by default")
    columns.add_argument("--id", metavar="COLUMN", help="unique; made of file and row by default")
    parsers["import"].add_argument(
        "--format", choices=("parquet", "jsonl", "csv"), help="by the file's name by default"
    )
    parsers["purge"].add_argument("--yes", action="store_true", help="confirm")


def _archive(args: argparse.Namespace) -> int:
    from airflow_broadway.cli.archive import archive

    with logging_at(logging.WARNING):
        return archive(args)
