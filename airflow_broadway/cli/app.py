"""The entry point of ``airflow-broadway``, and its exit codes.

0: success.  1: completed with findings: a message was not found, a check or a crash test failed.
2: refused or failed; the reason is one line on standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name

from airflow_broadway.cli.arguments import build_parser
from airflow_broadway.cli.output import (
    Result,
    logging_at,
    only_results_on_stdout,
    print_error,
    print_json,
    print_lines,
)
from airflow_broadway.core.errors import BroadwayError

#: Exit codes; a command with findings returns 1.
SUCCEEDED, REFUSED, INTERRUPTED = 0, 2, 130

#: Selects where Airflow looks up connections; "server", as in Airflow's own commands, includes the
#: metadata database.
_CONTEXT = "_AIRFLOW_PROCESS_CONTEXT"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = build_parser().parse_args(argv)
    try:
        with only_results_on_stdout(), _airflow_connections(), logging_at(args.log_level):
            result: Result = resolve_name(args.handler)(args)
            if args.json:
                print_json(result.value)
            else:
                print_lines(*result.lines)
            return result.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe; flushing the buffer at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SUCCEEDED
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
