"""``airflow-broadway archive``: what a pipeline has kept of the messages that it received."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from airflow_broadway.adapters.staging import open_existing_store, open_store
from airflow_broadway.cli.output import CommandError, cut, say, say_json
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


def archive(given: argparse.Namespace) -> int:
    """Carry out one of the commands."""
    if given.action == "import":
        store = open_store(given.staging)
    else:
        store = open_existing_store(given.staging)
        check_pipeline(store, given.pipeline_name)
    folder = archive_folder(store, given.pipeline_name)
    code: int = _ACTIONS[given.action](folder, given)
    return code


def _interval(given: argparse.Namespace, *, needed: bool = True) -> Interval | None:
    """The interval of the arguments; instants without a time zone are in UTC.

    :raises CommandError: If it is none.
    """
    if given.start is None and given.end is None and not needed:
        return None
    if given.start is None or given.end is None:
        raise CommandError("give both --start and --end")
    start, end = (_instant(name, getattr(given, name)) for name in ("start", "end"))
    if start >= end:
        raise CommandError(f"--start ({start.isoformat()}) is to be before --end")
    return Interval(start, end)


def _instant(name: str, text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(
            f"--{name} is no instant in ISO 8601, such as 2013-01-01T00:00:00Z: {text!r}"
        ) from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def _list(folder: Folder, given: argparse.Namespace) -> int:
    found = look(folder, _interval(given, needed=False))
    counted: dict[str, list[int]] = {}
    for hour, files in sorted(found.hours.items()):
        shown = start_of(hour).strftime("%Y-%m-%dT%H:00Z" if given.hours else "%Y-%m-%d")
        day = counted.setdefault(shown, [0, 0, 0])
        for index, more in enumerate((1, len(files), sum(files.values()))):
            day[index] += more
    if given.json:
        names = ("hours", "files", "messages")
        say_json([{"time": at, **dict(zip(names, n, strict=True))} for at, n in counted.items()])
    elif not counted:
        say(f"Nothing is archived there: {redacted(folder.store.uri)}/{folder.path}.")
    else:
        say(*table(("time", "hours", "files", "messages"), [(at, *n) for at, n in counted.items()]))
    return 0


def _show(folder: Folder, given: argparse.Namespace) -> int:
    interval = _needed(given)
    rows = (
        line_of(row)
        for each in tables(folder, look(folder, interval), interval)
        for row in each.to_pylist()
    )
    shown = list(islice(rows, given.limit))
    more = next(rows, None) is not None
    if given.json:
        say_json(shown)
        return 0
    say(
        *table(
            ("time", "message", "size", "payload"),
            [
                (
                    each["time"],
                    each["message_id"],
                    each["size"],
                    cut(each.get("payload", "(no text)"), 80),
                )
                for each in shown
            ],
        )
    )
    if more:
        say(f"These are the first {len(shown)}: --limit shows more.")
    return 0


def _failed(folder: Folder, given: argparse.Namespace) -> int:
    found = list(failures(folder))
    if given.json:
        say_json([dict(each) for each in found])
        return 0
    if not found:
        say("Nothing is kept there of what failed in runs of the archive, or of past runs.")
        return 0
    rows = (
        (each["at"][:19], each["run_id"], each["message_id"], each["stage"], cut(each["reason"]))
        for each in found
    )
    say(*table(("failed at", "run", "message", "stage", "reason"), rows))
    return 0


def _import(folder: Folder, given: argparse.Namespace) -> int:
    chosen = Chosen(time=given.time, payload=given.payload, id=given.id)
    done = import_file(folder, Path(given.file), chosen, SystemClock().now(), given.format or "")
    if given.json:
        say_json(done._asdict())
    elif done.before:
        say(f"{given.file} was imported before: nothing was changed.")
    else:
        say(f"Imported {many(done.messages, 'message')} of {given.file}.")
    return 0


def _export(folder: Folder, given: argparse.Namespace) -> int:
    count = export(folder, _needed(given), Path(given.file))
    if given.json:
        say_json({"file": given.file, "messages": count})
    else:
        say(f"Wrote {many(count, 'message')} to {given.file}.")
    return 0


def _purge(folder: Folder, given: argparse.Namespace) -> int:
    interval = _needed(given)
    if not given.yes:
        raise CommandError(
            f"nothing was removed: give --yes to remove {interval} for good (now"
            f" {many(look(folder, interval).messages, 'message')})"
        )
    done = purge(folder, interval, SystemClock().now())
    if given.json:
        say_json(done._asdict())
    else:
        say(f"Removed {many(done.messages, 'message')} of {many(done.hours, 'hour')}.")
    return 0


def _needed(given: argparse.Namespace) -> Interval:
    found = _interval(given)
    assert found is not None
    return found


_ACTIONS: dict[str, Any] = {
    "failed": _failed,
    "list": _list,
    "show": _show,
    "import": _import,
    "export": _export,
    "purge": _purge,
}
