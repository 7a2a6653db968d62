"""The source ``dead_letters``: a run sends dead letters back, and drains the queue behind that; or
it deletes some, and receives nothing.

So a dead letter goes the way of any message of its queue: by its own route, in the hands of one
run at a time, on its first attempt, through the code of today.  Whoever is killed on the way leaves
each of them in the queue or among the dead letters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Final

from airflow_broadway.core.custody.dead_letters import EVERY, Choice, Moved
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import RequestRefused
from airflow_broadway.core.model.run_source import DEAD_LETTERS, RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import many

log = logging.getLogger(__name__)

#: The param of a run that says which dead letters it moves, and how.
PARAM: Final = "dead_letters"
#: What can be done with them: sent back to their queue, or deleted.
REQUEUE, DELETE = "requeue", "delete"
#: Letters that an error names.
_MOST_NAMED: Final = 10
#: What the param may hold.
_TEXTS: Final = ("pipeline", "action", "reason", "stage", "since", "until")


def check_choice(given: Any) -> dict[str, Any]:
    """Return the param, checked; empty if it is empty: all dead letters are sent back.

    :raises RequestRefused: Naming what is wrong with it.
    """
    if given in (None, "", {}):
        return {}
    if not isinstance(given, Mapping):
        raise RequestRefused(f"{PARAM} is an object such as {{'stage': 'batch'}}: {given!r:.80}")
    unknown = sorted(set(given) - {*_TEXTS, "ids"})
    if unknown:
        known = ", ".join((*_TEXTS, "ids"))
        raise RequestRefused(f"{PARAM} has the unknown names {unknown}: it may have {known}")
    for name in _TEXTS:
        if not isinstance(given.get(name, ""), str):
            raise RequestRefused(f"{PARAM}.{name} is a text: {given[name]!r:.80}")
    ids = given.get("ids", [])
    if not isinstance(ids, (list, tuple)) or not all(isinstance(each, str) for each in ids):
        raise RequestRefused(f"{PARAM}.ids is a list of message ids: {ids!r:.80}")
    if given.get("action", REQUEUE) not in (REQUEUE, DELETE):
        raise RequestRefused(
            f"{PARAM}.action is {REQUEUE!r} or {DELETE!r}: {given['action']!r:.80}"
        )
    found = {name: value for name, value in given.items() if value}
    choice_of(found)
    return found


def choice_of(given: Mapping[str, Any]) -> Choice:
    """The dead letters that a checked param chooses.

    :raises RequestRefused: If one of its timestamps is none.
    """
    ids = given.get("ids")
    return Choice(
        ids=frozenset(ids) if ids else None,
        reason=given.get("reason", ""),
        stage=given.get("stage", ""),
        since=_timestamp(given, "since"),
        until=_timestamp(given, "until"),
    )


def _timestamp(given: Mapping[str, Any], name: str) -> datetime | None:
    if not given.get(name):
        return None
    try:
        at = datetime.fromisoformat(given[name])
    except ValueError:
        raise RequestRefused(
            f"{PARAM}.{name} is no timestamp such as 2026-01-31T12:00:00+00:00: {given[name]!r:.80}"
        ) from None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at


def deletes(source: RunSource) -> bool:
    """Whether a run deletes dead letters, and receives nothing."""
    return source.kind == DEAD_LETTERS and source.only.get("action") == DELETE


def move_letters(pipeline: Pipeline, env: ProducerEnv) -> None:
    """Send dead letters back, or delete them, if they are the source of the run, before it
    receives.

    Of a run's producers the first does so.

    :raises RequestRefused: If none that was chosen was moved.  An earlier try of the task may have
        moved them: then it is a warning, unless some have to stay.
    :raises BroadwayError: If the place for dead letters is not there, or cannot be reached.
    """
    source = pipeline.run.source
    if source.kind != DEAD_LETTERS or env.index:
        return
    choice = choice_of(source.only)
    with closing(pipeline.producer.dead_letters(env)) as letters:
        moved = letters.delete(choice) if deletes(source) else letters.requeue(choice)
        place = letters.place
    found = "" if choice == EVERY else f" that were chosen by {dict(source.only)}"
    first_try = env.owner.get("try_number", 1) == 1
    if not moved.count and (moved.refused or (choice != EVERY and first_try)):
        raise _nothing_moved(source, moved, place, found)
    number = many(moved.count, "dead letter")
    if deletes(source):
        log.info("Deleted %s of %s%s: this run receives nothing.", number, place, found)
    else:
        log.info("Sent %s of %s back%s: this run drains them.", number, place, found)
    if moved.unknown:
        log.warning("No dead letters of %s, or no more: %s.", place, ", ".join(moved.unknown))
    for key, why in moved.refused.items():
        log.error("The dead letter %s of %s stays there: %s", key, place, why)


def _nothing_moved(source: RunSource, moved: Moved, place: str, found: str) -> RequestRefused:
    why = [f"{key} stays: {reason}" for key, reason in moved.refused.items()]
    if moved.unknown:
        why.append(f"no dead letters, or no more: {', '.join(moved.unknown[:_MOST_NAMED])}")
    done = "deleted" if deletes(source) else "sent back"
    return RequestRefused(
        f"no dead letters of {place}{found} were {done}"
        f" ({'; '.join(why[:_MOST_NAMED]) or 'there are none'}), and nothing was received: look"
        " with `airflow-broadway dead-letters list`"
    )
