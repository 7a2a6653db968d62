"""``airflow-broadway dead-letters``: the messages that a pipeline's broker has set aside."""

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
from airflow_broadway.cli.output import CommandError, cut, say, say_json
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

#: Bytes of a payload that people are shown unless they ask for more.
_BYTES = 2_000
#: What may be a long text of its sender.
_TEXTS = ("reason", "stage", "generation", "origin", "original_id")
#: Characters of a reason by which letters are counted together, as in a run's report.
_REASON = 200


def dead_letters(given: argparse.Namespace) -> int:
    """Carry out one of the commands; 1 if there is something to look at."""
    with _opened(given) as place:
        code: int = _ACTIONS[given.action](place, given)
        return code


# -- the commands ----------------------------------------------------------------------------------


def _list(place: DeadLetters, given: argparse.Namespace) -> int:
    # First: a broker may not count what is being looked at.
    total = place.count() if given.by_reason else None
    looked = _look(
        place,
        _choice(given),
        limit=given.limit,
        offset=given.offset,
        seconds=given.seconds,
        by_reason=given.by_reason,
    )
    if given.json:
        letters = [_row(each) for each in looked.letters]
        say_json(letters if total is None else looked.to_json(place, total))
    elif not looked.matching:
        say(f"No dead letters in {place.place}.")
    else:
        _say_list(place, looked, total)
    return 0


def listed_letters(
    place: DeadLetters, choice: Choice, *, limit: int, offset: int, seconds: float
) -> dict[str, Any]:
    """Some letters, and how many there are of each reason, as JSON."""
    total = place.count()
    return _look(
        place, choice, limit=limit, offset=offset, seconds=seconds, by_reason=True
    ).to_json(place, total)


@dataclass(slots=True)
class _Looked:
    """What was found while looking.

    :param letters: Those that are asked for.
    :param matching: All that were met, of those that are chosen.
    :param whole: Whether there are no more than these.
    :param reasons: How many of each stage and reason.
    """

    letters: list[DeadLetter]
    matching: int = 0
    whole: bool = True
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)

    def to_json(self, place: DeadLetters, total: int) -> dict[str, Any]:
        shown = self.reasons.most_common(SHOWN_REASONS)
        return {
            "place": place.place,
            "total": total,
            "matching": self.matching,
            "whole": self.whole,
            "reasons": [{"count": n, "stage": s, "reason": r} for (s, r), n in shown],
            "other_reasons": self.matching - sum(n for _, n in shown),
            "letters": [_row(each) for each in self.letters],
        }


def _look(
    place: DeadLetters,
    choice: Choice,
    *,
    limit: int,
    offset: int,
    seconds: float | None,
    by_reason: bool,
) -> _Looked:
    """Look as far as is asked: to the last letter shown, or to the end; and not for too long."""
    looked, clock = _Looked([]), SystemClock()
    until = math.inf if seconds is None else clock.monotonic() + seconds
    # Where time counts, letters that are not chosen count as well.
    with _walk(place, choice if seconds is None else EVERY) as letters:
        for letter in letters:
            if choice.takes(letter):
                enough = looked.matching >= offset + limit
                if enough and not by_reason:
                    looked.whole = False
                    break
                if looked.matching >= offset and not enough:
                    looked.letters.append(letter)
                looked.matching += 1
                looked.reasons[letter.stage, letter.reason[:_REASON]] += 1
            if clock.monotonic() >= until:
                looked.whole = False
                break
    return looked


def _say_list(place: DeadLetters, looked: _Looked, total: int | None) -> None:
    if total is not None:
        found = looked.to_json(place, total)
        counts = [
            (each["count"], each["stage"] or None, cut(each["reason"]) or None)
            for each in found["reasons"]
        ]
        if found["other_reasons"]:
            counts.append((found["other_reasons"], None, "other reasons"))
        say(*table(("letters", "stage", "reason"), counts), "")
    rows = (
        (
            each.message_id,
            each.attempt,
            each.stage or None,
            None if each.died_at is None else each.died_at.isoformat(timespec="seconds"),
            len(each.body),
            cut(each.reason) or None,
        )
        for each in looked.letters
    )
    heads = ("message id", "attempt", "stage", "died at", "bytes", "reason")
    say(f"In {place.place}:", "", *table(heads, rows))
    if total is not None and not looked.whole:
        say("", "There was no time to look at all of them: --seconds gives more.")
    elif not looked.whole:
        say("", f"These are the first {len(looked.letters)}: --limit shows more.")


def _show(place: DeadLetters, given: argparse.Namespace) -> int:
    """1 if one of the ids is none of theirs."""
    found: dict[str, DeadLetter] = {}
    wanted = dict.fromkeys([*given.named_ids, *given.message_id])
    if not wanted:
        raise CommandError("which letters? Give their ids")
    claimed: dict[str, DeadLetter] = {}
    with _walk(place, Choice(ids=frozenset(wanted))) as letters:
        for each in letters:
            if each.message_id in wanted:
                found[each.message_id] = each
            else:
                claimed.setdefault(each.original_id, each)
            if len(found) == len(wanted):
                break
    found = claimed | found
    unknown = [each for each in wanted if each not in found]
    if given.json:
        limit = given.bytes
        say_json([export_letter(found[each], limit) for each in wanted if each in found])
    else:
        for number, key in enumerate(each for each in wanted if each in found):
            say(*([""] if number else []), *_shown(found[key], given))
    if unknown and not given.json:
        say(_UNKNOWN.format(place.place, ", ".join(unknown)))
    return int(bool(unknown))


_UNKNOWN = "No dead letters of {}, or no more: {}."


def _requeue(place: DeadLetters, given: argparse.Namespace) -> int:
    moved = place.requeue(_chosen(given), to=given.to)
    return _say_moved(given, moved, place, "requeued", "Sent {} back from {}.")


def _delete(place: DeadLetters, given: argparse.Namespace) -> int:
    moved = place.delete(_chosen(given))
    return _say_moved(given, moved, place, "deleted", "Deleted {} of {}.")


def _say_moved(
    given: argparse.Namespace, moved: Moved, place: DeadLetters, word: str, text: str
) -> int:
    """Print what was done; 1 if letters that were named are not there, or some had to stay."""
    if given.json:
        say_json({word: moved.count, "unknown": moved.unknown, "refused": dict(moved.refused)})
    else:
        say(text.format(many(moved.count, "dead letter"), place.place))
        if moved.unknown:
            say(_UNKNOWN.format("it", ", ".join(moved.unknown)))
        for key, why in moved.refused.items():
            say(f"{key} stays: {cut(why, 300)}")
    return int(bool(moved.unknown or moved.refused))


# -- which letters ---------------------------------------------------------------------------------


def _choice(given: argparse.Namespace) -> Choice:
    return Choice(
        ids=frozenset(given.message_id) if given.message_id else None,
        reason=given.reason,
        stage=given.stage,
        since=given.since,
        until=given.until,
    )


def _chosen(given: argparse.Namespace) -> Choice:
    """Which ones are to be moved.

    :raises CommandError: If nothing is chosen, and ``--all`` not said; or both.
    """
    choice = _choice(given)
    if given.all == (choice != Choice()):
        raise CommandError(
            "--all takes every dead letter, and --message-id, --reason, --stage, --since and"
            " --until choose some: give the one or the other"
        )
    return choice


@contextmanager
def _walk(place: DeadLetters, choice: Choice) -> Iterator[Iterator[DeadLetter]]:
    """The chosen letters; those that are not read are others' again when it ends."""
    letters: Any = place.letters(choice)
    with closing(letters):
        yield letters


# -- what is printed -------------------------------------------------------------------------------


def _shown(letter: DeadLetter, given: argparse.Namespace) -> list[str]:
    about = {
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
    lines = [f"{name + ':':<12}{value}" for name, value in about.items() if value not in ("", None)]
    body = letter.body[: given.bytes or _BYTES]
    lines.append(f"{'payload:':<12}{many(len(letter.body), 'byte')}")
    if len(body) < len(letter.body):
        lines[-1] += f", of which these are the first {len(body):,} (--bytes shows more)"
    return [*lines, *_payload(body, letter.body, given.format)]


def _payload(body: bytes, whole: bytes, form: str) -> list[str]:
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


def _row(letter: DeadLetter) -> dict[str, Any]:
    """What a list has of a letter: no body, no properties, and no long text of its sender."""
    value = letter._asdict()
    del value["properties"]
    value["bytes"] = len(value.pop("body"))
    short = {name: cut_bytes(value[name], MAX_REASON) for name in _TEXTS}
    return value | short


def export_letter(letter: DeadLetter, limit: int | None) -> dict[str, Any]:
    """A letter with its payload as JSON, of which ``limit`` bytes at most."""
    value = letter._asdict()
    raw: bytes = value.pop("body")
    value["bytes"] = len(raw)
    raw = raw[:limit]
    try:
        value["body"] = raw.decode("utf-8")
    except UnicodeDecodeError:
        value["body_base64"] = base64.b64encode(raw).decode("ascii")
    return value


# -- what is looked at -----------------------------------------------------------------------------


@contextmanager
def _opened(given: argparse.Namespace) -> Iterator[DeadLetters]:
    """The place that the arguments name."""
    reference, pipeline = named_pipeline(given.pipeline, given.named)
    if given.archive:
        if given.place is not None or given.conn_id is not None:
            raise CommandError("--archive asks no broker: leave --place and --conn-id out")
        folder = archive_folder(open_store(given.staging), pipeline.name)
        yield ArchiveLetters(folder)
        return
    producer = connected(pipeline.producer, reference, given.conn_id)
    store = open_store(given.staging)
    env = ProducerEnv(
        pipeline=pipeline.name,
        connections=AirflowConnections(),
        staging=f"{store.uri.rstrip('/')}/{pipeline.name}",
        shared=f"{store.uri.rstrip('/')}/{SHARED}",
    )
    with closing(producer.dead_letters(env, place=given.place)) as letters:
        yield letters


_ACTIONS = {"list": _list, "show": _show, "requeue": _requeue, "delete": _delete}
