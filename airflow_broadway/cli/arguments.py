"""The commands and their arguments.

A command's parser sets ``handler``, the path of the function that carries it out, and
``log_level``, the level of log lines on standard error meanwhile.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from airflow_broadway.cli.output import print_error
from airflow_broadway.core.text import parse_timestamp, printable
from airflow_broadway.core.version import __version__

#: Seconds before a broker counts as unresponsive.
DEPTH_SECONDS = 15.0

#: Options that several commands share: metavariable and help.
_SHARED = {
    "--dag-id": ("D", "the Dag's id"),
    "--run-id": ("R", "the run's id"),
    "--staging": ("URI", "the staging root; Airflow's [broadway] staging by default"),
    "--conn-id": ("ID", "the Airflow connection; the pipeline's by default"),
    "--pipeline-name": ("NAME", "the pipeline's name, if several staged the run"),
}


class _Parser(argparse.ArgumentParser):
    """Reports usage errors in one line, and has ``--version``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.add_argument("--version", action="version", version=f"airflow-broadway {__version__}")

    def error(self, message: str) -> NoReturn:
        print_error(f"{printable(message)} (see {self.prog} --help)")
        raise SystemExit(2)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses unknown options here, where the command is known."""
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = _Parser(
        prog="airflow-broadway",
        description="Create and check pipelines, inspect staged runs, manage dead letters and"
        " archives, report queue depths, send to the embedded queue, crash-test a pipeline.",
        epilog="Exit codes: 0 success; 1 completed with findings; 2 refused or failed.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (_add_init, _add_check, _add_runs, _add_dead_letters, _add_depth, _add_archive):
        add(commands)
    _add_queue(commands)
    _add_crash_test(commands)
    return parser


# -- parts of a parser -----------------------------------------------------------------------------


def _add_command(
    commands: Any, name: str, text: str, handler: str, log_level: int = logging.WARNING
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=f"airflow_broadway.cli.{handler}", log_level=log_level, action=name)
    return parser


def _add_group(commands: Any, name: str, text: str) -> Any:
    """Adds a command that consists of actions; returns their parsers."""
    group = commands.add_parser(name, help=text, description=text)
    return group.add_subparsers(metavar="ACTION", required=True)


def _add(parser: Any, name: str, metavar: str | None, text: str, **settings: Any) -> None:
    parser.add_argument(name, metavar=metavar, help=text, **settings)


def _add_flag(parser: Any, name: str, text: str) -> None:
    parser.add_argument(name, action="store_true", help=text)


def _add_shared(parser: Any, *names: str, required: bool = False) -> None:
    for name in names:
        _add(parser, name, *_SHARED[name], required=required)


def _number(
    read: Callable[[str], float], holds: Callable[[float], bool], rule: str
) -> Callable[[str], float]:
    """Returns the type of an argument: a number that satisfies a rule."""

    def parse(text: str) -> float:
        try:
            number = read(text)
        except ValueError:
            number = math.nan
        if not holds(number):
            raise argparse.ArgumentTypeError(f"expected {rule}, got: {text!r}")
        return number

    return parse


_positive = _number(int, lambda number: number >= 1, "a number of at least 1")
_count = _number(int, lambda number: number >= 0, "a number of at least 0")
_share = _number(float, lambda number: 0 <= number <= 1, "a number from 0 to 1")
_seconds = _number(float, lambda number: 0 < number < math.inf, "seconds above 0")


def _timestamp(text: str) -> datetime:
    try:
        return parse_timestamp(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a timestamp in ISO 8601, such as 2013-01-01T00:00:00Z, got: {text!r}"
        ) from None


# -- commands --------------------------------------------------------------------------------------


def _add_init(commands: Any) -> None:
    text = "Create a folder with a pipeline, its Dag, its test and its connections."
    parser = _add_command(commands, "init", text, "init.init")
    parser.add_argument("name", metavar="NAME", help="the pipeline's name, and the folder's")
    queues, sinks = (
        ("sqlite", "rabbitmq", "sqs", "kafka", "pubsub"),
        ("parquet", "delta", "iceberg", "postgres"),
    )
    _add(parser, "--queue", None, "its queue; sqlite by default", choices=queues, default="sqlite")
    _add(parser, "--sink", None, "its sink; parquet by default", choices=sinks, default="parquet")


def _add_runs(commands: Any) -> None:
    """Adds the commands on staged runs."""
    text = "List the staged runs by time, newest last."
    runs = _add_command(commands, "runs", text, "runs.runs")
    text = "only the N newest; 50 by default, all as JSON"
    _add(runs, "--limit", "N", text, type=_positive)
    _add_flag(
        runs,
        "--failed",
        "only those that need attention: a sum that does not balance, failed tasks, messages"
        " that lapsed or could not be settled, or all of which failed",
    )
    text = "Show a run's generations, batches and report."
    show = _add_command(commands, "show", text, "runs.show")
    text = "Trace a message through every staged run."
    where = _add_command(commands, "where", text, "runs.where")
    where.add_argument("message_id", metavar="MESSAGE_ID")
    text = (
        "Remove the files of a settled run after inspection; retention never removes a run that"
        " did not balance."
    )
    remove = _add_command(commands, "remove", text, "runs.remove")
    _add_flag(remove, "--yes", "confirm")
    for parser in (show, remove):
        _add_shared(parser, "--dag-id", "--run-id", required=True)
    for parser in (runs, where):
        _add_shared(parser, "--dag-id")
    for parser in (runs, show, where, remove):
        _add_shared(parser, "--staging", "--pipeline-name")


def _add_archive(commands: Any) -> None:
    text = "Count or purge a pipeline's archived messages."
    actions = _add_group(commands, "archive", text)
    parsers = {}
    for name, text in (
        ("list", "Count messages by day or hour."),
        ("purge", "Remove hours for good."),
    ):
        parser = parsers[name] = _add_command(actions, name, text, "archive.archive")
        _add(parser, "--pipeline-name", "NAME", "the pipeline's name", required=True)
        _add_shared(parser, "--staging")
        for edge in ("--start", "--end"):
            text = "in ISO 8601; UTC without an offset"
            _add(parser, edge, "WHEN", text, type=_timestamp, required=name != "list")
    _add_flag(parsers["list"], "--hours", "by hour, not by day")
    _add_flag(parsers["purge"], "--yes", "confirm")


def _add_check(commands: Any) -> None:
    text = (
        "Diagnose versions, staging, Dags, and the connections, brokers, sinks and Spark of"
        " pipelines, with a cure for each finding.  No message is received."
    )
    # The findings and the error include what the broker's client logs.
    parser = _add_command(commands, "check", text, "check.check", logging.CRITICAL)
    text = "pkg.module:Class, or a reference as JSON; may be repeated; default: those of all Dags"
    _add(parser, "--pipeline", "REF", text, action="append", default=[])
    text = "also submit an application without batches by each Dag's task, to see staging from it"
    _add_flag(parser, "--spark", text)
    _add_shared(parser, "--conn-id", "--staging")


def _add_dead_letters(commands: Any) -> None:
    text = "List, show, requeue or delete a pipeline's dead letters."
    actions = _add_group(commands, "dead-letters", text)
    for name, text in (
        ("list", "List them, roughly in order of dead-lettering; none is removed."),
        ("show", "Show some in full, with reason, properties and payload."),
        ("requeue", "Requeue them to the pipeline's source, as first attempts."),
        ("delete", "Delete them for good."),
    ):
        # The error includes what the broker's client logs.
        handler = "dead_letters.dead_letters"
        parser = _add_command(actions, name, text, handler, logging.CRITICAL)
        text = "pkg.module:Class, or a reference as JSON"
        _add(parser, "--pipeline", "REF", text, action="append", required=True)
        _add(parser, "--named", "NAME", "the pipeline to use if --pipeline is repeated")
        _add_shared(parser, "--conn-id", "--staging")
        _add(parser, "--place", "NAME", "the dead-letter queue or topic; default: its own")
        text = "failures of archive runs and replays instead of the broker's dead letters"
        _add_flag(parser, "--archive", text)
        if name == "show":
            parser.add_argument("named_ids", nargs="*", metavar="MESSAGE_ID")
            text = "the same; use --message-id=ID for an id that begins with a dash"
            _add(parser, "--message-id", "ID", text, action="extend", nargs="+", default=[])
            _add(
                parser,
                "--as",
                None,
                "how to print payloads; text by default",
                dest="format",
                choices=("text", "json", "hex"),
                default="text",
            )
            text = "bytes of each payload; 2,000 by default, all with --json"
            _add(parser, "--bytes", "N", text, type=_positive)
            continue
        filters = parser.add_argument_group("filters; combined with AND")
        _add(filters, "--message-id", "ID", "of these ids", action="extend", nargs="+")
        _add(filters, "--reason", "TEXT", "whose reason contains it", default="")
        _add(filters, "--stage", "STAGE", "of this stage", default="")
        for edge, text in (("--since", "at or after"), ("--until", "before")):
            text = f"dead-lettered {text} it, in ISO 8601; UTC without an offset"
            _add(filters, edge, "TIME", text, type=_timestamp)
        if name == "list":
            _add(parser, "--limit", "N", "100 by default", type=_positive, default=100)
            _add(parser, "--offset", "N", "skip the first N", type=_count, default=0)
            _add_flag(parser, "--by-reason", "also count them by reason")
            _add(parser, "--seconds", "N", "stop after N seconds", type=_positive)
        else:
            _add_flag(filters, "--all", "all dead letters")
        if name == "requeue":
            text = (
                "the target queue or topic (Pub/Sub: subscription); the pipeline's by default,"
                " never one named in a dead letter"
            )
            _add(parser, "--to", "NAME", text)


def _add_depth(commands: Any) -> None:
    text = (
        "Report the queue depths of pipelines and the age of the oldest message; none is received."
    )
    # The result of each pipeline includes what its broker's client logs.
    parser = _add_command(commands, "depth", text, "depth.depth", logging.CRITICAL)
    text = "pkg.module:Class, or a reference as JSON; may be repeated"
    _add(parser, "--pipeline", "REF", text, action="append", required=True)
    _add_shared(parser, "--conn-id", "--staging")
    text = f"seconds before a broker counts as unresponsive; {DEPTH_SECONDS:g} by default"
    _add(parser, "--timeout", "S", text, type=_seconds, default=DEPTH_SECONDS)


def _add_queue(commands: Any) -> None:
    text = "Create a queue of the embedded broker, and send messages to it."
    actions = _add_group(commands, "queue", text)
    for name, text in (
        ("create", "Create an empty queue, and its file, unless they exist."),
        ("send", "Send the lines of a file, or of standard input, as messages."),
    ):
        parser = _add_command(actions, name, text, "queue.queue")
        file = parser.add_mutually_exclusive_group(required=True)
        _add(file, "--path", "FILE", "the queue file")
        _add(file, "--conn-id", "ID", "the Airflow connection that names it")
        _add(parser, "--queue", "NAME", "the queue's name", required=True)
    _add(parser, "input", "INPUT", "- for stdin", nargs="?", default="-")


def _add_crash_test(commands: Any) -> None:
    text = (
        "Run a pipeline over an embedded queue repeatedly: each run is killed, fails or sleeps at"
        " another of its external calls and continues as under Airflow; then every message and"
        " every row of its sink is counted."
    )
    parser = _add_command(commands, "crash-test", text, "crash_test.crash_test")
    _add(parser, "--pipeline", "REF", "pkg.module:Class", required=True)
    text = "returns the rows of the sink; called with the case's folder"
    _add(parser, "--sink", "MODULE:FUNCTION", text)
    text = "empties a sink that is not in the case's folder; called before each case"
    _add(parser, "--prepare", "MODULE:FUNCTION", text)
    messages = parser.add_mutually_exclusive_group()
    _add(messages, "--messages", "FILE", "one message per line")
    text = "the numbers from 0; 12 by default"
    _add(messages, "--count", "N", text, type=_positive, default=12)
    families = "crashes,zombies,faults,pairs"
    _add(parser, "--families", "LIST", f"of {families}; all by default", default=families)
    text = (
        "0 to 1: the share of the cases at the package's own calls; all cases at callbacks and at"
        " the calls that these make are run"
    )
    _add(parser, "--share", "S", text, type=_share, default=1.0)
    text = "number of cases with two faults; none by default"
    _add(parser, "--pairs", "N", text, type=_count, default=0)
    _add(parser, "--seed", "N", "seed of the sample", type=int, default=1)
    _add(parser, "--jobs", "N", "concurrent cases; 1 by default", type=_positive, default=1)
    text = "only this case, as the report prints it; may be repeated"
    _add(parser, "--only", "'POINT: FAULT [RECOVERY]'", text, action="append", default=[])
    _add_flag(parser, "--keep", "keep the files of cases that failed")
