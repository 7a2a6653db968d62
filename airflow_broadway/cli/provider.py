"""The command ``airflow broadway``: the commands of ``airflow-broadway`` in Airflow's own."""

from __future__ import annotations

import argparse
from typing import Any


def get_broadway_cli_commands() -> list[Any]:
    """Returns Airflow's ``CLICommand`` for this package."""
    from airflow.cli.cli_config import ActionCommand, Arg, lazy_load_command

    rest = Arg(  # type: ignore[no-untyped-call]
        ("arguments",),
        nargs=argparse.REMAINDER,
        help="a command of airflow-broadway and its arguments: see airflow-broadway --help",
    )
    return [
        ActionCommand(
            name="broadway",
            help="Run a command of airflow-broadway",
            func=lazy_load_command("airflow_broadway.cli.provider.run"),
            args=(rest,),
        )
    ]


def run(args: argparse.Namespace) -> None:
    """Runs the command, and exits with its exit code."""
    from airflow_broadway.cli.app import main

    raise SystemExit(main(args.arguments))
