"""``airflow-broadway archive``: inspects, imports, exports and purges archived messages."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

from airflow_broadway.adapters.staging import open_existing_store, open_store
from airflow_broadway.cli.output import CommandError, Result, cut
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


def archive(args: argparse.Namespace) -> Result:
    """Runs one action of the command."""
    if args.action == "import":
        store = open_store(args.staging)
    else:
        store = open_existing_store(args.staging)
        check_pipeline(store, args.pipeline_name)
    args.interval = _interval(args)
    result: Result = _ACTIONS[args.action](archive_folder(store, args.pipeline_name), args)
    return result


def _interval(args: argparse.Namespace) -> Interval | None:
    """Returns the interval of the arguments; ``None`` if there is none.

    :raises CommandError: If one end is missing, or the interval is empty.
    """
    start, end = getattr(args, "start", None), getattr(args, "end", None)
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


def _show(folder: Folder, args: argparse.Namespace) -> Result:
    rows = (
        line_of(row)
        for batch in tables(folder, look(folder, args.interval), args.interval)
        for row in batch.to_pylist()
    )
    messages = list(islice(rows, args.limit))
    cells = (
        (line["time"], line["message_id"], line["size"], cut(line.get("payload", "(no text)"), 80))
        for line in messages
    )
    lines = table(("time", "message", "size", "payload"), cells)
    if next(rows, None) is not None:
        lines.append(f"These are the first {len(messages)}: --limit shows more.")
    return Result(messages, lines)


def _failed(folder: Folder, args: argparse.Namespace) -> Result:
    records = [dict(record) for record in failures(folder)]
    rows = (
        (row["at"][:19], row["run_id"], row["message_id"], row["stage"], cut(row["reason"]))
        for row in records
    )
    lines = table(("failed at", "run", "message", "stage", "reason"), rows)
    if not records:
        lines = ["No failures of archive runs or replays are recorded."]
    return Result(records, lines)


def _import(folder: Folder, args: argparse.Namespace) -> Result:
    columns = Chosen(time=args.time, payload=args.payload, id=args.id)
    result = import_file(folder, Path(args.file), columns, SystemClock().now(), args.format or "")
    text = f"Imported {many(result.messages, 'message')} of {args.file}."
    if result.before:
        text = f"{args.file} was imported before: nothing was changed."
    return Result(result._asdict(), [text])


def _export(folder: Folder, args: argparse.Namespace) -> Result:
    count = export(folder, args.interval, Path(args.file))
    text = f"Wrote {many(count, 'message')} to {args.file}."
    return Result({"file": args.file, "messages": count}, [text])


def _purge(folder: Folder, args: argparse.Namespace) -> Result:
    if not args.yes:
        raise CommandError(
            f"nothing was removed: use --yes to remove {args.interval} for good (now"
            f" {many(look(folder, args.interval).messages, 'message')})"
        )
    result = purge(folder, args.interval, SystemClock().now())
    text = f"Removed {many(result.messages, 'message')} of {many(result.hours, 'hour')}."
    return Result(result._asdict(), [text])


_ACTIONS: dict[str, Any] = {
    "failed": _failed,
    "list": _list,
    "show": _show,
    "import": _import,
    "export": _export,
    "purge": _purge,
}
