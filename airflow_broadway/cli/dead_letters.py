"""``airflow-broadway dead-letters``: inspects and moves a pipeline's dead letters."""

from __future__ import annotations

import argparse
import base64
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from airflow_broadway.adapters.staging import env_outside_run, open_store
from airflow_broadway.cli.opening import connected, named_pipeline
from airflow_broadway.cli.output import CommandError, Result, cut
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.dead_letters import EVERY, Choice, DeadLetter, DeadLetters
from airflow_broadway.core.custody.run_summary import SHOWN_REASONS
from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.core.text import cut as cut_bytes
from airflow_broadway.core.text import pluralize, table
from airflow_broadway.runs.reading.payload import hex_lines
from airflow_broadway.staging.archive.letters import ArchiveLetters
from airflow_broadway.staging.archive.table import archive_folder

#: Bytes of a payload that are printed without --bytes.
_BYTES = 2_000
#: Fields whose text comes from the sender and may be long.
_SENDER_FIELDS = ("reason", "stage", "generation", "origin", "original_id")
#: Characters of a reason by which dead letters are grouped, as in a run's report.
_REASON = 200


def dead_letters(args: argparse.Namespace) -> Result:
    """Runs one action of the command; the exit code is 1 if there are findings."""
    with _open_dead_letters(args) as dlq:
        return {"list": _list, "show": _show}.get(args.action, _move)(dlq, args)


# -- the commands ----------------------------------------------------------------------------------


def _list(dlq: DeadLetters, args: argparse.Namespace) -> Result:
    # Counted first: brokers may exclude messages that are being read.
    total = dlq.count() if args.by_reason else None
    choice = _parse_choice(args)
    listing = _Listing.read(
        dlq, choice, args.limit, args.offset, args.seconds, by_reason=args.by_reason
    )
    if total is None:
        return Result([_to_row(letter) for letter in listing.letters], listing.lines(dlq))
    value = listing.to_json(dlq, total)
    return Result(value, listing.lines(dlq, value))


def listed_letters(
    dlq: DeadLetters, choice: Choice, *, limit: int, offset: int, seconds: float
) -> dict[str, Any]:
    """Returns a page of dead letters, and the count of each reason, as JSON."""
    total = dlq.count()
    listing = _Listing.read(dlq, choice, limit, offset, seconds, by_reason=True)
    return listing.to_json(dlq, total)


@dataclass(slots=True)
class _Listing:
    """A page of dead letters, and totals.

    :param letters: The page.
    :param matching: Dead letters read so far that match the filters.
    :param whole: Whether all dead letters were read.
    :param reasons: Counts by stage and reason.
    """

    letters: list[DeadLetter] = field(default_factory=list)
    matching: int = 0
    whole: bool = True
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def read(
        cls,
        dlq: DeadLetters,
        choice: Choice,
        limit: int,
        offset: int,
        seconds: float | None,
        *,
        by_reason: bool,
    ) -> _Listing:
        """Reads to the end of the page, or all with ``by_reason``, within ``seconds``."""
        listing, clock = cls(), SystemClock()
        deadline = math.inf if seconds is None else clock.monotonic() + seconds
        # With a time limit, non-matching dead letters must return here as well.
        with open_letters(dlq, choice if seconds is None else EVERY) as letters:
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

    def lines(self, dlq: DeadLetters, report: Mapping[str, Any] | None = None) -> Iterator[str]:
        """Formats the page; with the counts of a report by reason."""
        if not self.matching:
            yield f"No dead letters in {dlq.place}."
            return
        if report is not None:
            counts = [
                (reason["count"], reason["stage"] or None, cut(reason["reason"]) or None)
                for reason in report["reasons"]
            ]
            if report["other_reasons"]:
                counts.append((report["other_reasons"], None, "other reasons"))
            yield from table(("letters", "stage", "reason"), counts)
            yield ""
        rows = (
            (
                letter.message_id,
                letter.attempt,
                letter.stage or None,
                None if letter.died_at is None else letter.died_at.isoformat(timespec="seconds"),
                len(letter.body),
                cut(letter.reason) or None,
            )
            for letter in self.letters
        )
        heads = ("message id", "attempt", "stage", "died at", "bytes", "reason")
        yield from (f"In {dlq.place}:", "", *table(heads, rows))
        if not self.whole and report is not None:
            yield from ("", "There was no time to look at all of them: --seconds gives more.")
        elif not self.whole:
            yield from ("", f"These are the first {len(self.letters)}: --limit shows more.")


def _show(dlq: DeadLetters, args: argparse.Namespace) -> Result:
    """Describes the dead letters with these ids; the exit code is 1 if an id is unknown."""
    wanted = dict.fromkeys([*args.named_ids, *args.message_id])
    if not wanted:
        raise CommandError("no message ids: name at least one dead letter")
    by_id: dict[str, DeadLetter] = {}
    by_original_id: dict[str, DeadLetter] = {}
    with open_letters(dlq, Choice(ids=frozenset(wanted))) as letters:
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
        return Result([export_letter(letter, args.bytes) for letter in known], (), bool(unknown))
    lines: list[str] = []
    for letter in known:
        lines += [*([""] if lines else []), *_format_letter(letter, args)]
    if unknown:
        lines.append(_UNKNOWN.format(dlq.place, ", ".join(unknown)))
    return Result(None, lines, bool(unknown))


_UNKNOWN = "No dead letters of {}, or no more: {}."


def _move(dlq: DeadLetters, args: argparse.Namespace) -> Result:
    """Requeues or deletes; the exit code is 1 if ids are unknown or dead letters were refused."""
    choice = _parse_choice(args)
    if args.all == (choice != Choice()):
        problem = "not both" if args.all else "and neither was given"
        raise CommandError(
            "use either --all or filters (--message-id, --reason, --stage, --since, --until),"
            f" {problem}"
        )
    if args.action == "requeue":
        moved, word, text = dlq.requeue(choice, to=args.to), "requeued", "Requeued {} from {}."
    else:
        moved, word, text = dlq.delete(choice), "deleted", "Deleted {} of {}."
    lines = [text.format(pluralize(moved.count, "dead letter"), dlq.place)]
    if moved.unknown:
        lines.append(_UNKNOWN.format("it", ", ".join(moved.unknown)))
    lines += [f"{key} stays: {cut(reason, 300)}" for key, reason in moved.refused.items()]
    value = {word: moved.count, "unknown": moved.unknown, "refused": dict(moved.refused)}
    return Result(value, lines, bool(moved.unknown or moved.refused))


def _parse_choice(args: argparse.Namespace) -> Choice:
    return Choice(
        ids=frozenset(args.message_id) if args.message_id else None,
        reason=args.reason,
        stage=args.stage,
        since=args.since,
        until=args.until,
    )


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
    lines.append(f"{'payload:':<12}{pluralize(len(letter.body), 'byte')}")
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
def open_letters(dlq: DeadLetters, choice: Choice) -> Iterator[Iterator[DeadLetter]]:
    """Iterates over the matching dead letters; releases unread ones on exit."""
    letters: Any = dlq.letters(choice)
    with closing(letters):
        yield letters


@contextmanager
def _open_dead_letters(args: argparse.Namespace) -> Iterator[DeadLetters]:
    """Opens the dead letters that the arguments name."""
    reference, pipeline = named_pipeline(args.pipeline, args.named)
    if args.archive:
        if args.place is not None or args.conn_id is not None:
            raise CommandError("--archive uses no broker: omit --place and --conn-id")
        yield ArchiveLetters(archive_folder(open_store(args.staging), pipeline.name))
        return
    producer = connected(pipeline.producer, reference, args.conn_id)
    env = env_outside_run(pipeline.name, args.staging)
    with closing(producer.dead_letters(env, place=args.place)) as letters:
        yield letters
