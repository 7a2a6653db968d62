"""The source ``dead_letters``: a run requeues dead letters and then drains the queue; or it deletes
dead letters and receives nothing.

A requeued dead letter is handled like any message of its queue: by its own route, held by one run
at a time, on its first attempt, by the current code.  If the process is killed meanwhile, every
dead letter is still in the queue or among the dead letters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime
from typing import Any, Final

from airflow_broadway.core.custody.dead_letters import EVERY, Choice, Moved
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import RequestRefused
from airflow_broadway.core.model.run_source import DEAD_LETTERS, RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import parse_timestamp, pluralize

log = logging.getLogger(__name__)

#: The param of a run that selects dead letters and the action on them.
PARAM: Final = "dead_letters"
#: The actions: requeue to the original queue, or delete.
REQUEUE, DELETE = "requeue", "delete"
#: Maximum number of dead letters that an error names.
_MOST_NAMED: Final = 10
#: The text fields of the param.
_TEXTS: Final = ("pipeline", "action", "reason", "stage", "since", "until")


def check_choice(param: Any) -> dict[str, Any]:
    """Validates the param; returns ``{}`` if it is empty, which requeues all dead letters.

    :raises RequestRefused: If it is invalid; names the problem.
    """
    if param in (None, "", {}):
        return {}
    if not isinstance(param, Mapping):
        raise RequestRefused(f"{PARAM} is an object such as {{'stage': 'batch'}}: {param!r:.80}")
    unknown = sorted(set(param) - {*_TEXTS, "ids"})
    if unknown:
        valid = ", ".join((*_TEXTS, "ids"))
        raise RequestRefused(f"{PARAM} has the unknown names {unknown}: it may have {valid}")
    for name in _TEXTS:
        if not isinstance(param.get(name, ""), str):
            raise RequestRefused(f"{PARAM}.{name} is a text: {param[name]!r:.80}")
    ids = param.get("ids", [])
    if not isinstance(ids, (list, tuple)) or not all(isinstance(key, str) for key in ids):
        raise RequestRefused(f"{PARAM}.ids is a list of message ids: {ids!r:.80}")
    if param.get("action", REQUEUE) not in (REQUEUE, DELETE):
        raise RequestRefused(
            f"{PARAM}.action is {REQUEUE!r} or {DELETE!r}: {param['action']!r:.80}"
        )
    fields = {name: value for name, value in param.items() if value}
    choice_of(fields)
    return fields


def choice_of(param: Mapping[str, Any]) -> Choice:
    """Converts a validated param to the selection of dead letters.

    :raises RequestRefused: If a timestamp is invalid.
    """
    ids = param.get("ids")
    return Choice(
        ids=frozenset(ids) if ids else None,
        reason=param.get("reason", ""),
        stage=param.get("stage", ""),
        since=_timestamp(param, "since"),
        until=_timestamp(param, "until"),
    )


def _timestamp(param: Mapping[str, Any], name: str) -> datetime | None:
    if not param.get(name):
        return None
    try:
        return parse_timestamp(param[name])
    except ValueError:
        raise RequestRefused(
            f"{PARAM}.{name} is no timestamp such as 2026-01-31T12:00:00+00:00: {param[name]!r:.80}"
        ) from None


def deletes(source: RunSource) -> bool:
    """Whether a run deletes dead letters and receives nothing."""
    return source.kind == DEAD_LETTERS and source.only.get("action") == DELETE


def move_letters(pipeline: Pipeline, env: ProducerEnv) -> None:
    """Requeues or deletes dead letters before the run receives, if they are its source.

    Only the first of a run's producers does so.

    :raises RequestRefused: If no selected dead letter was moved.  On a later try, which may follow
        one that moved them, this is only logged unless the broker refused to move some.
    :raises BroadwayError: If the dead-letter queue does not exist or cannot be reached.
    """
    source = pipeline.run.source
    if source.kind != DEAD_LETTERS or env.index:
        return
    choice = choice_of(source.only)
    with closing(pipeline.producer.dead_letters(env)) as dead_letters:
        moved = dead_letters.delete(choice) if deletes(source) else dead_letters.requeue(choice)
        place = dead_letters.place
    selection = "" if choice == EVERY else f" selected by {dict(source.only)}"
    first_try = env.owner.get("try_number", 1) == 1
    if not moved.count and (moved.refused or (choice != EVERY and first_try)):
        raise _none_moved(source, moved, place, selection)
    number = pluralize(moved.count, "dead letter")
    if deletes(source):
        log.info("Deleted %s of %s%s: this run receives nothing.", number, place, selection)
    else:
        log.info("Requeued %s of %s%s: this run drains them.", number, place, selection)
    if moved.unknown:
        log.warning("Not, or no longer, dead letters of %s: %s.", place, ", ".join(moved.unknown))
    for key, reason in moved.refused.items():
        log.error("The dead letter %s of %s was not moved: %s", key, place, reason)


def _none_moved(source: RunSource, moved: Moved, place: str, selection: str) -> RequestRefused:
    errors = [f"{key} was not moved: {reason}" for key, reason in moved.refused.items()]
    if moved.unknown:
        errors.append(f"not, or no longer, dead letters: {', '.join(moved.unknown[:_MOST_NAMED])}")
    done = "deleted" if deletes(source) else "requeued"
    return RequestRefused(
        f"no dead letters of {place}{selection} were {done}"
        f" ({'; '.join(errors[:_MOST_NAMED]) or 'there are none'}), and nothing was received:"
        " look with `airflow-broadway dead-letters list`"
    )
