"""``airflow-broadway archive``: inspects, imports, exports and purges archived messages."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from airflow_broadway.adapters.staging import open_existing_store, open_store
from airflow_broadway.cli.output import CommandError, cut, print_json, print_lines
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.core.text import many, table
from airflow_broadway.runs.reading.runs import check_pipeline
from airflow_broadway.staging.archive.exchange import Chosen, export, import_file, line_of
from airflow_broadway.staging.archive.failed import failures
from airflow_broadway.staging.archive.layout import archive_folder, start_of
from airflow_broadway.staging.archive.reader import look, tables
from airflow_broadway.staging.archive.removal import purge
from airflow_broadway.staging.store import Folder


def archive(args: argparse.Namespace) -> int:
    """Runs one action of the command."""
    if args.action == "import":
        store = open_store(args.staging)
    else:
        store = open_existing_store(args.staging)
        check_pipeline(store, args.pipeline_name)
    folder = archive_folder(store, args.pipeline_name)
    code: int = _ACTIONS[args.action](folder, args)
    return code


def _parse_interval(args: argparse.Namespace, *, required: bool = True) -> Interval | None:
    """Returns the interval of the arguments; timestamps without a time zone are in UTC.

    :raises CommandError: If one end is missing, or the interval is empty.
    """
    if args.start is None and args.end is None and not required:
        return None
    if args.start is None or args.end is None:
        raise CommandError("use both --start and --end")
    start, end = (_parse_timestamp(name, getattr(args, name)) for name in ("start", "end"))
    if start >= end:
        raise CommandError(f"--start ({start.isoformat()}) is to be before --end")
    return Interval(start, end)


def _parse_timestamp(name: str, text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(
            f"--{name} is no timestamp in ISO 8601, such as 2013-01-01T00:00:00Z: {text!r}"
        ) from None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


def _list(folder: Folder, args: argparse.Namespace) -> int:
    selection = look(folder, _parse_interval(args, required=False))
    counts: dict[str, list[int]] = {}
    for hour, files in sorted(selection.hours.items()):
        start = start_of(hour).strftime("%Y-%m-%dT%H:00Z" if args.hours else "%Y-%m-%d")
        totals = counts.setdefault(start, [0, 0, 0])
        for index, number in enumerate((1, len(files), sum(files.values()))):
            totals[index] += number
    if args.json:
        names = ("hours", "files", "messages")
        print_json([{"time": at, **dict(zip(names, n, strict=True))} for at, n in counts.items()])
    elif not counts:
        print_lines(f"Nothing is archived in {redacted(folder.store.uri)}/{folder.path}.")
    else:
        rows = [(at, *n) for at, n in counts.items()]
        print_lines(*table(("time", "hours", "files", "messages"), rows))
    return 0


def _show(folder: Folder, args: argparse.Namespace) -> int:
    interval = _required_interval(args)
    rows = (
        line_of(row)
        for batch in tables(folder, look(folder, interval), interval)
        for row in batch.to_pylist()
    )
    messages = list(islice(rows, args.limit))
    more = next(rows, None) is not None
    if args.json:
        print_json(messages)
        return 0
    lines = (
        (line["time"], line["message_id"], line["size"], cut(line.get("payload", "(no text)"), 80))
        for line in messages
    )
    print_lines(*table(("time", "message", "size", "payload"), lines))
    if more:
        print_lines(f"These are the first {len(messages)}: --limit shows more.")
    return 0


def _failed(folder: Folder, args: argparse.Namespace) -> int:
    records = list(failures(folder))
    if args.json:
        print_json([dict(record) for record in records])
        return 0
    if not records:
        print_lines("No failures of archive runs or replays are recorded.")
        return 0
    rows = (
        (row["at"][:19], row["run_id"], row["message_id"], row["stage"], cut(row["reason"]))
        for row in records
    )
    print_lines(*table(("failed at", "run", "message", "stage", "reason"), rows))
    return 0


def _import(folder: Folder, args: argparse.Namespace) -> int:
    columns = Chosen(time=args.time, payload=args.payload, id=args.id)
    result = import_file(folder, Path(args.file), columns, SystemClock().now(), args.format or "")
    if args.json:
        print_json(result._asdict())
    elif result.before:
        print_lines(f"{args.file} was imported before: nothing was changed.")
    else:
        print_lines(f"Imported {many(result.messages, 'message')} of {args.file}.")
    return 0


def _export(folder: Folder, args: argparse.Namespace) -> int:
    count = export(folder, _required_interval(args), Path(args.file))
    if args.json:
        print_json({"file": args.file, "messages": count})
    else:
        print_lines(f"Wrote {many(count, 'message')} to {args.file}.")
    return 0


def _purge(folder: Folder, args: argparse.Namespace) -> int:
    interval = _required_interval(args)
    if not args.yes:
        raise CommandError(
            f"nothing was removed: use --yes to remove {interval} for good (now"
            f" {many(look(folder, interval).messages, 'message')})"
        )
    result = purge(folder, interval, SystemClock().now())
    if args.json:
        print_json(result._asdict())
    else:
        print_lines(f"Removed {many(result.messages, 'message')} of {many(result.hours, 'hour')}.")
    return 0


def _required_interval(args: argparse.Namespace) -> Interval:
    interval = _parse_interval(args)
    assert interval is not None
    return interval


_ACTIONS: dict[str, Any] = {
    "failed": _failed,
    "list": _list,
    "show": _show,
    "import": _import,
    "export": _export,
    "purge": _purge,
}
