"""``airflow-broadway dead-letters``: inspects and moves a pipeline's dead letters."""

from __future__ import annotations

import argparse
import base64
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from airflow_broadway.adapters.connections import AirflowConnections
from airflow_broadway.adapters.staging import open_store
from airflow_broadway.cli.opening import connected, named_pipeline
from airflow_broadway.cli.output import CommandError, cut, print_json, print_lines
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.dead_letters import (
    EVERY,
    Choice,
    DeadLetter,
    DeadLetters,
    Moved,
)
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.run_summary import SHOWN_REASONS
from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.core.formats.layout import SHARED
from airflow_broadway.core.text import cut as cut_bytes
from airflow_broadway.core.text import many, table
from airflow_broadway.runs.reading.payload import hex_lines
from airflow_broadway.staging.archive.layout import archive_folder
from airflow_broadway.staging.archive.letters import ArchiveLetters

#: Bytes of a payload that are printed without --bytes.
_BYTES = 2_000
#: Fields whose text comes from the sender and may be long.
_SENDER_FIELDS = ("reason", "stage", "generation", "origin", "original_id")
#: Characters of a reason by which dead letters are grouped, as in a run's report.
_REASON = 200


def dead_letters(args: argparse.Namespace) -> int:
    """Runs one action of the command; returns 1 if there are findings."""
    with _open_dead_letters(args) as dlq:
        code: int = _ACTIONS[args.action](dlq, args)
        return code


# -- the commands ----------------------------------------------------------------------------------


def _list(dlq: DeadLetters, args: argparse.Namespace) -> int:
    # Counted first: brokers may exclude messages that are being read.
    total = dlq.count() if args.by_reason else None
    listing = _collect(
        dlq,
        _parse_choice(args),
        limit=args.limit,
        offset=args.offset,
        seconds=args.seconds,
        by_reason=args.by_reason,
    )
    if args.json:
        letters = [_to_row(letter) for letter in listing.letters]
        print_json(letters if total is None else listing.to_json(dlq, total))
    elif not listing.matching:
        print_lines(f"No dead letters in {dlq.place}.")
    else:
        _print_listing(dlq, listing, total)
    return 0


def listed_letters(
    dlq: DeadLetters, choice: Choice, *, limit: int, offset: int, seconds: float
) -> dict[str, Any]:
    """Returns a page of dead letters, and the count of each reason, as JSON."""
    total = dlq.count()
    return _collect(
        dlq, choice, limit=limit, offset=offset, seconds=seconds, by_reason=True
    ).to_json(dlq, total)


@dataclass(slots=True)
class _Listing:
    """A page of dead letters, and totals.

    :param letters: The page.
    :param matching: Dead letters read so far that match the filters.
    :param whole: Whether all dead letters were read.
    :param reasons: Counts by stage and reason.
    """

    letters: list[DeadLetter]
    matching: int = 0
    whole: bool = True
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)

    def to_json(self, dlq: DeadLetters, total: int) -> dict[str, Any]:
        counts = self.reasons.most_common(SHOWN_REASONS)
        return {
            "place": dlq.place,
            "total": total,
            "matching": self.matching,
            "whole": self.whole,
            "reasons": [{"count": n, "stage": s, "reason": r} for (s, r), n in counts],
            "other_reasons": self.matching - sum(n for _, n in counts),
            "letters": [_to_row(letter) for letter in self.letters],
        }


def _collect(
    dlq: DeadLetters,
    choice: Choice,
    *,
    limit: int,
    offset: int,
    seconds: float | None,
    by_reason: bool,
) -> _Listing:
    """Reads dead letters to the end of the page, or all with ``by_reason``, within ``seconds``."""
    listing, clock = _Listing([]), SystemClock()
    deadline = math.inf if seconds is None else clock.monotonic() + seconds
    # With a time limit, non-matching dead letters must return here as well.
    with _open_letters(dlq, choice if seconds is None else EVERY) as letters:
        for letter in letters:
            if choice.takes(letter):
                page_full = listing.matching >= offset + limit
                if page_full and not by_reason:
                    listing.whole = False
                    break
                if listing.matching >= offset and not page_full:
                    listing.letters.append(letter)
                listing.matching += 1
                listing.reasons[letter.stage, letter.reason[:_REASON]] += 1
            if clock.monotonic() >= deadline:
                listing.whole = False
                break
    return listing


def _print_listing(dlq: DeadLetters, listing: _Listing, total: int | None) -> None:
    if total is not None:
        report = listing.to_json(dlq, total)
        counts = [
            (reason["count"], reason["stage"] or None, cut(reason["reason"]) or None)
            for reason in report["reasons"]
        ]
        if report["other_reasons"]:
            counts.append((report["other_reasons"], None, "other reasons"))
        print_lines(*table(("letters", "stage", "reason"), counts), "")
    rows = (
        (
            letter.message_id,
            letter.attempt,
            letter.stage or None,
            None if letter.died_at is None else letter.died_at.isoformat(timespec="seconds"),
            len(letter.body),
            cut(letter.reason) or None,
        )
        for letter in listing.letters
    )
    heads = ("message id", "attempt", "stage", "died at", "bytes", "reason")
    print_lines(f"In {dlq.place}:", "", *table(heads, rows))
    if total is not None and not listing.whole:
        print_lines("", "There was no time to look at all of them: --seconds gives more.")
    elif not listing.whole:
        print_lines("", f"These are the first {len(listing.letters)}: --limit shows more.")


def _show(dlq: DeadLetters, args: argparse.Namespace) -> int:
    """Prints the dead letters with these ids; returns 1 if an id is unknown."""
    by_id: dict[str, DeadLetter] = {}
    wanted = dict.fromkeys([*args.named_ids, *args.message_id])
    if not wanted:
        raise CommandError("no message ids: name at least one dead letter")
    by_original_id: dict[str, DeadLetter] = {}
    with _open_letters(dlq, Choice(ids=frozenset(wanted))) as letters:
        for letter in letters:
            if letter.message_id in wanted:
                by_id[letter.message_id] = letter
            else:
                by_original_id.setdefault(letter.original_id, letter)
            if len(by_id) == len(wanted):
                break
    by_id = by_original_id | by_id
    unknown = [message_id for message_id in wanted if message_id not in by_id]
    known = [by_id[message_id] for message_id in wanted if message_id in by_id]
    if args.json:
        print_json([export_letter(letter, args.bytes) for letter in known])
    else:
        for number, letter in enumerate(known):
            print_lines(*([""] if number else []), *_format_letter(letter, args))
    if unknown and not args.json:
        print_lines(_UNKNOWN.format(dlq.place, ", ".join(unknown)))
    return int(bool(unknown))


_UNKNOWN = "No dead letters of {}, or no more: {}."


def _requeue(dlq: DeadLetters, args: argparse.Namespace) -> int:
    moved = dlq.requeue(_required_choice(args), to=args.to)
    return _print_moved(args, moved, dlq, "requeued", "Requeued {} from {}.")


def _delete(dlq: DeadLetters, args: argparse.Namespace) -> int:
    moved = dlq.delete(_required_choice(args))
    return _print_moved(args, moved, dlq, "deleted", "Deleted {} of {}.")


def _print_moved(
    args: argparse.Namespace, moved: Moved, dlq: DeadLetters, word: str, text: str
) -> int:
    """Prints the result; returns 1 if ids are unknown or dead letters were refused."""
    if args.json:
        print_json({word: moved.count, "unknown": moved.unknown, "refused": dict(moved.refused)})
    else:
        print_lines(text.format(many(moved.count, "dead letter"), dlq.place))
        if moved.unknown:
            print_lines(_UNKNOWN.format("it", ", ".join(moved.unknown)))
        for key, reason in moved.refused.items():
            print_lines(f"{key} stays: {cut(reason, 300)}")
    return int(bool(moved.unknown or moved.refused))


# -- filters ---------------------------------------------------------------------------------------


def _parse_choice(args: argparse.Namespace) -> Choice:
    return Choice(
        ids=frozenset(args.message_id) if args.message_id else None,
        reason=args.reason,
        stage=args.stage,
        since=args.since,
        until=args.until,
    )


def _required_choice(args: argparse.Namespace) -> Choice:
    """Returns the choice of dead letters to move.

    :raises CommandError: If neither filters nor ``--all`` are given, or both.
    """
    choice = _parse_choice(args)
    if args.all == (choice != Choice()):
        problem = "not both" if args.all else "and neither was given"
        raise CommandError(
            "use either --all or filters (--message-id, --reason, --stage, --since, --until),"
            f" {problem}"
        )
    return choice


@contextmanager
def _open_letters(dlq: DeadLetters, choice: Choice) -> Iterator[Iterator[DeadLetter]]:
    """Iterates over the matching dead letters; releases unread ones on exit."""
    letters: Any = dlq.letters(choice)
    with closing(letters):
        yield letters


# -- output ---------------------------------------------------------------------------------------


def _format_letter(letter: DeadLetter, args: argparse.Namespace) -> list[str]:
    fields = {
        "message id": letter.message_id,
        "of message": letter.original_id if letter.original_id != letter.message_id else "",
        "from": letter.origin,
        "reason": letter.reason,
        "stage": letter.stage,
        "attempt": letter.attempt,
        "sent at": letter.enqueued_at,
        "died at": letter.died_at,
        "generation": letter.generation,
        "properties": json.dumps(letter.properties, ensure_ascii=False, default=str),
    }
    lines = [
        f"{name + ':':<12}{value}" for name, value in fields.items() if value not in ("", None)
    ]
    body = letter.body[: args.bytes or _BYTES]
    lines.append(f"{'payload:':<12}{many(len(letter.body), 'byte')}")
    if len(body) < len(letter.body):
        lines[-1] += f", of which these are the first {len(body):,} (--bytes shows more)"
    return [*lines, *_format_payload(body, letter.body, args.format)]


def _format_payload(body: bytes, whole: bytes, form: str) -> list[str]:
    if form == "hex":
        return hex_lines(body)
    if form == "json":
        try:
            text = json.dumps(json.loads(whole), indent=2, ensure_ascii=False)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"a payload is no JSON ({error}): --as text or --as hex") from None
        if len(body) < len(whole):
            text = text.encode()[: len(body)].decode("utf-8", "ignore")
        return text.split("\n")
    return body.decode("utf-8", "backslashreplace").split("\n")


def _to_row(letter: DeadLetter) -> dict[str, Any]:
    """Returns a dead letter without body and properties, with the sender's texts truncated."""
    value = letter._asdict()
    del value["properties"]
    value["bytes"] = len(value.pop("body"))
    short = {name: cut_bytes(value[name], MAX_REASON) for name in _SENDER_FIELDS}
    return value | short


def export_letter(letter: DeadLetter, limit: int | None) -> dict[str, Any]:
    """Returns a dead letter as JSON, with at most ``limit`` bytes of its payload."""
    value = letter._asdict()
    raw: bytes = value.pop("body")
    value["bytes"] = len(raw)
    raw = raw[:limit]
    try:
        value["body"] = raw.decode("utf-8")
    except UnicodeDecodeError:
        value["body_base64"] = base64.b64encode(raw).decode("ascii")
    return value


# -- access ---------------------------------------------------------------------------------------


@contextmanager
def _open_dead_letters(args: argparse.Namespace) -> Iterator[DeadLetters]:
    """Opens the dead letters that the arguments name."""
    reference, pipeline = named_pipeline(args.pipeline, args.named)
    if args.archive:
        if args.place is not None or args.conn_id is not None:
            raise CommandError("--archive uses no broker: omit --place and --conn-id")
        folder = archive_folder(open_store(args.staging), pipeline.name)
        yield ArchiveLetters(folder)
        return
    producer = connected(pipeline.producer, reference, args.conn_id)
    store = open_store(args.staging)
    env = ProducerEnv(
        pipeline=pipeline.name,
        connections=AirflowConnections(),
        staging=f"{store.uri.rstrip('/')}/{pipeline.name}",
        shared=f"{store.uri.rstrip('/')}/{SHARED}",
    )
    with closing(producer.dead_letters(env, place=args.place)) as letters:
        yield letters


_ACTIONS = {"list": _list, "show": _show, "requeue": _requeue, "delete": _delete}
