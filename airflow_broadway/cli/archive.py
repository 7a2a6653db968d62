"""``airflow-broadway archive``: counts and purges archived messages."""

from __future__ import annotations

import argparse

from airflow_broadway.adapters.staging import open_existing_store
from airflow_broadway.cli.output import CommandError, Result
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.core.text import pluralize, table
from airflow_broadway.runs.reading.runs import check_pipeline
from airflow_broadway.staging.archive.reader import look
from airflow_broadway.staging.archive.table import archive_folder, purge, start_of
from airflow_broadway.staging.store import Folder


def archive(args: argparse.Namespace) -> Result:
    """Runs one action of the command."""
    store = open_existing_store(args.staging)
    check_pipeline(store, args.pipeline_name)
    args.interval = _interval(args)
    action = _list if args.action == "list" else _purge
    return action(archive_folder(store, args.pipeline_name), args)


def _interval(args: argparse.Namespace) -> Interval | None:
    """Returns the interval of the arguments; ``None`` if there is none.

    :raises CommandError: If one end is missing, or the interval is empty.
    """
    start, end = args.start, args.end
    if start is None and end is None:
        return None
    if start is None or end is None:
        raise CommandError("use both --start and --end")
    if start >= end:
        raise CommandError(f"--start ({start.isoformat()}) is to be before --end")
    return Interval(start, end)


def _list(folder: Folder, args: argparse.Namespace) -> Result:
    counts: dict[str, list[int]] = {}
    for hour, files in sorted(look(folder, args.interval).hours.items()):
        start = start_of(hour).strftime("%Y-%m-%dT%H:00Z" if args.hours else "%Y-%m-%d")
        totals = counts.setdefault(start, [0, 0, 0])
        for index, number in enumerate((1, len(files), sum(files.values()))):
            totals[index] += number
    heads = ("time", "hours", "files", "messages")
    rows = [(at, *totals) for at, totals in counts.items()]
    lines = table(heads, rows)
    if not rows:
        lines = [f"Nothing is archived in {redacted(folder.store.uri)}/{folder.path}."]
    return Result([dict(zip(heads, row, strict=True)) for row in rows], lines)


def _purge(folder: Folder, args: argparse.Namespace) -> Result:
    if not args.yes:
        raise CommandError(
            f"nothing was removed: use --yes to remove {args.interval} for good (now"
            f" {pluralize(look(folder, args.interval).messages, 'message')})"
        )
    result = purge(folder, args.interval)
    text = f"Removed {pluralize(result.messages, 'message')} of {pluralize(result.hours, 'hour')}."
    return Result(result._asdict(), [text])
