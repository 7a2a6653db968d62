"""The arguments and exit codes of ``airflow-broadway``.

0: success.  1: completed with findings: a message was not found, a check or a crash test failed.
2: refused or failed; the reason is one line on standard error.
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
from airflow_broadway.cli.output import logging_at, one_line, only_results_on_stdout, print_error
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.version import __version__

#: Exit codes.
FOUND, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130

#: Selects where Airflow looks up connections; "server", as in Airflow's own commands, includes the
#: metadata database.
_CONTEXT = "_AIRFLOW_PROCESS_CONTEXT"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = build_parser().parse_args(argv)
    try:
        with only_results_on_stdout(), _airflow_connections():
            code: int = args.handler(args)
            return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe; flushing the buffer at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND
    except (BroadwayError, OSError) as error:
        print_error(error)
        return REFUSED


@contextmanager
def _airflow_connections() -> Iterator[None]:
    before = os.environ.get(_CONTEXT)
    os.environ.setdefault(_CONTEXT, "server")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CONTEXT, None)


class _Parser(argparse.ArgumentParser):
    """Reports usage errors in one line."""

    def error(self, message: str) -> NoReturn:
        print_error(f"{one_line(message)} (see {self.prog} --help)")
        raise SystemExit(REFUSED)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; each command sets ``handler``."""
    parser = _Parser(
        prog="airflow-broadway",
        description="Inspect staged runs, manage dead letters and archives, check brokers,"
        " report queue depths, send to the embedded queue, crash-test a pipeline.",
        epilog="Exit codes: 0 success; 1 completed with findings; 2 refused or failed.",
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


def _add_staged_run(parser: argparse.ArgumentParser, *, one_run: bool) -> None:
    parser.add_argument("--dag-id", required=one_run, metavar="D", help="the Dag's id")
    if one_run:
        parser.add_argument("--run-id", required=True, metavar="R", help="the run's id")
    add_staging(parser)
    parser.add_argument(
        "--pipeline-name", metavar="NAME", help="the pipeline's name, if several staged the run"
    )


def _add_runs(commands: Any) -> None:
    parser = command(commands, "runs", "List the staged runs by time, newest last.", _runs)
    _add_staged_run(parser, one_run=False)
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the N newest; 50 by default, all as JSON"
    )
    parser.add_argument(
        "--failed",
        action="store_true",
        help="only those that need attention: a sum that does not balance, failed tasks, messages"
        " that lapsed or could not be settled, or all of which failed",
    )


def _add_remove(commands: Any) -> None:
    parser = command(
        commands,
        "remove",
        "Remove the files of a settled run after inspection; retention never removes a run that"
        " did not balance.",
        _remove,
    )
    _add_staged_run(parser, one_run=True)
    parser.add_argument("--yes", action="store_true", help="confirm")


def _remove(args: argparse.Namespace) -> int:
    from airflow_broadway.cli.runs import remove

    with logging_at(logging.WARNING):
        return remove(args)


def _runs(args: argparse.Namespace) -> int:
    from airflow_broadway.cli.runs import runs

    with logging_at(logging.WARNING):
        return runs(args)


def _add_show(commands: Any) -> None:
    parser = command(commands, "show", "Show a run's generations, batches and report.", _show)
    _add_staged_run(parser, one_run=True)


def _show(args: argparse.Namespace) -> int:
    from airflow_broadway.cli.runs import show

    with logging_at(logging.WARNING):
        return show(args)


def _add_where(commands: Any) -> None:
    parser = command(commands, "where", "Trace a message through every staged run.", _where)
    parser.add_argument("message_id", metavar="MESSAGE_ID")
    _add_staged_run(parser, one_run=False)


def _where(args: argparse.Namespace) -> int:
    from airflow_broadway.cli.find import where

    with logging_at(logging.WARNING):
        return where(args)


def _add_crash_test(commands: Any) -> None:
    parser = command(
        commands,
        "crash-test",
        "Run a pipeline over an embedded queue repeatedly: each run is killed, fails or sleeps at"
        " another of its external calls and continues as under Airflow; then every message and"
        " every row of its sink is counted.",
        _crash_test,
    )
    parser.add_argument("--pipeline", required=True, metavar="REF", help="pkg.module:Class")
    parser.add_argument(
        "--sink",
        metavar="MODULE:FUNCTION",
        help="returns the rows of the sink; called with the case's folder",
    )
    parser.add_argument(
        "--prepare",
        metavar="MODULE:FUNCTION",
        help="empties a sink that is not in the case's folder; called before each case",
    )
    messages = parser.add_mutually_exclusive_group()
    messages.add_argument("--messages", metavar="FILE", help="one message per line")
    messages.add_argument(
        "--count", type=positive, default=12, metavar="N", help="the numbers from 0; 12 by default"
    )
    parser.add_argument(
        "--families",
        default="crashes,zombies,faults,pairs",
        metavar="LIST",
        help="of crashes,zombies,faults,pairs; all by default",
    )
    parser.add_argument(
        "--share",
        type=_parse_share,
        default=1.0,
        metavar="S",
        help="0 to 1: the share of the cases at the package's own calls; all cases at callbacks"
        " and at the calls that these make are run",
    )
    parser.add_argument(
        "--pairs",
        type=_parse_count,
        default=0,
        metavar="N",
        help="number of cases with two faults; none by default",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the sample")
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="concurrent cases; 1 by default"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="'POINT: FAULT [RECOVERY]'",
        help="only this case, as the report prints it; may be repeated",
    )
    parser.add_argument("--keep", action="store_true", help="keep the files of cases that failed")


def _parse_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got: {text!r}")
    return share


def _parse_count(text: str) -> int:
    return 0 if text == "0" else positive(text)


def _crash_test(args: argparse.Namespace) -> int:
    from airflow_broadway.cli.crash_test import crash_test

    with logging_at(logging.WARNING):
        return crash_test(args)
