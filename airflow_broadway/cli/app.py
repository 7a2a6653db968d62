"""The arguments of ``airflow-broadway``, and what its exit codes mean.

0: done, and nothing to look at.  1: done, and there is something to look at: a message is nowhere,
a check or a crash test found something.  2: not done; one line on standard
error says why.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from airflow_broadway.cli.arguments import (
    add_archive,
    add_check,
    add_dead_letters,
    add_depth,
    add_queue,
    add_staging,
    command,
    positive,
)
from airflow_broadway.cli.output import complain, logging_at, one_line, only_results_on_stdout
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.version import __version__

#: Exit codes.
FOUND, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130

#: Where Airflow looks for connections: "server" is what its own commands say, and means also the
#: metadata database.
_CONTEXT = "_AIRFLOW_PROCESS_CONTEXT"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    given = build_parser().parse_args(argv)
    try:
        with only_results_on_stdout(), _connections_of_airflow():
            code: int = given.handler(given)
            return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has seen enough; what is still buffered would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND
    except (BroadwayError, OSError) as error:
        complain(error)
        return REFUSED


@contextmanager
def _connections_of_airflow() -> Iterator[None]:
    before = os.environ.get(_CONTEXT)
    os.environ.setdefault(_CONTEXT, "server")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CONTEXT, None)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        complain(f"{one_line(message)} (see {self.prog} --help)")
        raise SystemExit(REFUSED)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets ``handler``."""
    parser = _Parser(
        prog="airflow-broadway",
        description="Look at staged runs, look after dead letters and archives, check brokers,"
        " report how much waits, send to the embedded queue, put a pipeline to the test.",
        epilog="Exit codes: 0 fine; 1 done, but look at it; 2 not done, and why.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"airflow-broadway {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_runs(commands)
    _add_show(commands)
    _add_where(commands)
    _add_remove(commands)
    add_archive(commands)
    add_check(commands)
    add_dead_letters(commands)
    add_depth(commands)
    add_queue(commands)
    _add_crash_test(commands)
    return parser


def _staged(parser: argparse.ArgumentParser, *, one_run: bool) -> None:
    parser.add_argument("--dag-id", required=one_run, metavar="D", help="the Dag's id")
    if one_run:
        parser.add_argument("--run-id", required=True, metavar="R", help="the run's id")
    add_staging(parser)
    parser.add_argument(
        "--pipeline-name", metavar="NAME", help="the pipeline's name, if several staged this"
    )


def _add_runs(commands: Any) -> None:
    made = command(commands, "runs", "List the staged runs by time, the newest last.", _runs)
    _staged(made, one_run=False)
    made.add_argument(
        "--limit", type=int, metavar="N", help="only the N newest; 50 by default, all as JSON"
    )
    made.add_argument(
        "--failed",
        action="store_true",
        help="only those that need looking at: a sum that does not balance, failed tasks, messages"
        " that lapsed or could not be settled, or all of which failed",
    )


def _add_remove(commands: Any) -> None:
    made = command(
        commands,
        "remove",
        "Remove the files of a settled run that you have looked at; one that did not balance stays"
        " until somebody does.",
        _remove,
    )
    _staged(made, one_run=True)
    made.add_argument("--yes", action="store_true", help="do it")


def _remove(given: argparse.Namespace) -> int:
    from airflow_broadway.cli.runs import remove

    with logging_at(logging.WARNING):
        return remove(given)


def _runs(given: argparse.Namespace) -> int:
    from airflow_broadway.cli.runs import runs

    with logging_at(logging.WARNING):
        return runs(given)


def _add_show(commands: Any) -> None:
    made = command(commands, "show", "A run's generations, batches and report.", _show)
    _staged(made, one_run=True)


def _show(given: argparse.Namespace) -> int:
    from airflow_broadway.cli.runs import show

    with logging_at(logging.WARNING):
        return show(given)


def _add_where(commands: Any) -> None:
    made = command(commands, "where", "What became of a message, in every staged run.", _where)
    made.add_argument("message_id", metavar="MESSAGE_ID")
    _staged(made, one_run=False)


def _where(given: argparse.Namespace) -> int:
    from airflow_broadway.cli.find import where

    with logging_at(logging.WARNING):
        return where(given)


def _add_crash_test(commands: Any) -> None:
    made = command(
        commands,
        "crash-test",
        "Run a pipeline over an embedded queue again and again: each time it is killed, fails or"
        " falls asleep at another of the calls by which it touches the world, goes on as Airflow"
        " would, and every message and every row of its sink is counted.",
        _crash_test,
    )
    made.add_argument("--pipeline", required=True, metavar="REF", help="pkg.module:Class")
    made.add_argument(
        "--sink",
        metavar="MODULE:FUNCTION",
        help="returns the rows that the sink holds; called with the case's folder",
    )
    made.add_argument(
        "--prepare",
        metavar="MODULE:FUNCTION",
        help="empties a sink that is not in the case's folder; called before each case",
    )
    what = made.add_mutually_exclusive_group()
    what.add_argument("--messages", metavar="FILE", help="one message a line")
    what.add_argument(
        "--count", type=positive, default=12, metavar="N", help="the numbers from 0; 12 by default"
    )
    made.add_argument(
        "--families",
        default="crashes,zombies,faults,pairs",
        metavar="LIST",
        help="of crashes,zombies,faults,pairs; all by default",
    )
    made.add_argument(
        "--share",
        type=_share,
        default=1.0,
        metavar="S",
        help="0 to 1: how much of the cases at the package's own calls; those at callbacks, and at"
        " calls that these make, are all run",
    )
    made.add_argument(
        "--pairs",
        type=_count,
        default=0,
        metavar="N",
        help="how many cases of two strikes; none by default",
    )
    made.add_argument("--seed", type=int, default=1, metavar="N", help="of what is chosen")
    made.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="cases at a time; 1 by default"
    )
    made.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="'POINT: WHAT [RECOVERY]'",
        help="just this case, as the report writes it; may be repeated",
    )
    made.add_argument("--keep", action="store_true", help="keep the files of cases that failed")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got: {text!r}")
    return share


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)


def _crash_test(given: argparse.Namespace) -> int:
    from airflow_broadway.cli.crash_test import crash_test

    with logging_at(logging.WARNING):
        return crash_test(given)
