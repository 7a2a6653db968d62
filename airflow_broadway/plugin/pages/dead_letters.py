"""A pipeline's dead letters: look at them, send them back, delete them.

All of it is asked of ``airflow-broadway dead-letters``, in a child process.  Whoever may read the
Dag's runs sees the list; a payload, and what changes something, is for those who may edit them.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

from airflow.models.log import Log
from airflow.utils.session import create_session
from fastapi import APIRouter, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import FormData

from airflow_broadway.plugin.access import EDITS_RUNS, READS_RUNS, GetUserDep, MayEdit
from airflow_broadway.plugin.children import CHILDREN, ChildError
from airflow_broadway.plugin.declared import declared_pipelines
from airflow_broadway.plugin.render import page
from airflow_broadway.plugin.rendered import UNFILLED, has_template, reference_of
from airflow_broadway.runs.view.payload import FORMS, payload_of

__all__ = ["router"]

log = logging.getLogger(__name__)

router = APIRouter(
    prefix="/dags/{dag_id}/pipelines/{pipeline}/dead-letters", dependencies=[READS_RUNS]
)

#: Letters on a page.
PAGE: Final = 100
#: Seconds for which letters are looked at: of very many, brokers show some in that time.
LOOK_SECONDS: Final = 10
#: Seconds in which letters are moved.
MOVE_SECONDS: Final = 120.0
#: Bytes of a payload that are fetched, and characters that are shown.
BYTES: Final = 256 * 1024
MOST_SHOWN: Final = 64 * 1024
#: Characters of a letter's properties that are shown; and letters that an answer names.
MOST_PROPERTIES: Final = 16 * 1024
MOST_NAMED: Final = 100

#: What can be done, and what has then been done.
_DONE: Final = {"requeue": "requeued", "delete": "deleted"}


@dataclass(frozen=True, slots=True)
class Filter:
    """Which letters: those to which all of it applies.  Instants are in UTC."""

    id: str = ""
    reason: str = ""
    stage: str = ""
    since: str = ""
    until: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Filter:
        """The filter of an address or a form.

        :raises HTTPException: 422, if an instant is none.
        """
        given = {each.name: _clean(values.get(each.name)).strip() for each in fields(cls)}
        return cls(**given | {name: _instant(name, given[name]) for name in ("since", "until")})

    def arguments(self) -> list[str]:
        """As the command takes it."""
        named = {"message-id": self.id, "reason": self.reason, "stage": self.stage}
        named |= {"since": _utc(self.since), "until": _utc(self.until)}
        return [f"--{name}={value}" for name, value in named.items() if value]

    def query(self, **changed: Any) -> str:
        """As a part of an address."""
        values = {each.name: getattr(self, each.name) for each in fields(self)} | changed
        given = {name: value for name, value in values.items() if value}
        return urlencode(given, errors="backslashreplace")

    def items(self) -> list[tuple[str, str]]:
        """What is given, by name."""
        given = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return [(name, value) for name, value in given if value]


def _clean(value: object) -> str:
    text = str(value or "")
    if "\0" in text:
        raise HTTPException(422, "No text holds a character of the number 0.")
    return text


def _instant(name: str, text: str) -> str:
    """An instant in UTC as a form has it: without its zone."""
    if not text:
        return ""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise HTTPException(422, f"{name} is no instant such as 2026-01-31T12:00.") from None
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    return at.replace(tzinfo=None).isoformat()


def _utc(text: str) -> str:
    return f"{text}+00:00" if text else ""


# -- looking ---------------------------------------------------------------------------------------


@router.get("")
async def show_list(
    request: Request, dag_id: str, pipeline: str, may_edit: MayEdit
) -> HTMLResponse:
    """The letters that a filter chooses, in pages, and how many there are of each reason."""
    chosen = Filter.of(request.query_params)
    number = _number(request.query_params.get("page"))
    facts: dict[str, Any] = {"dag_id": dag_id, "pipeline": pipeline}
    facts |= {"chosen": chosen, "may_edit": may_edit}
    try:
        found = await _listed(dag_id, pipeline, chosen, limit=PAGE, offset=(number - 1) * PAGE)
    except ChildError as error:
        facts |= {"found": None, "trouble": str(error)}
        return page(request, "dead_letters.html", status=503, **facts)
    for each in found["reasons"]:
        # A form cannot carry a line's end as it is.
        each["find"] = next(iter(each["reason"].strip().splitlines()), "")
    pages = max(1, -(-found["matching"] // PAGE))
    return page(
        request, "dead_letters.html", found=found, number=number, pages=pages, size=PAGE, **facts
    )


@router.get("/{message_id:path}", dependencies=[EDITS_RUNS])
async def show_one(request: Request, dag_id: str, pipeline: str, message_id: str) -> HTMLResponse:
    """One letter whole, with its payload."""
    form = request.query_params.get("as")
    if form not in (None, *FORMS):
        raise HTTPException(422, f"A payload is shown as {', '.join(FORMS)}.")
    answer = await CHILDREN.ask(
        *await _command(dag_id, pipeline, "show"),
        f"--message-id={_clean(message_id)}",
        f"--bytes={BYTES}",
    )
    if not answer.value:
        raise HTTPException(404, f"{message_id} is no dead letter, or no more.")
    [letter] = answer.value
    raw = letter.get("body_base64")
    body = base64.b64decode(raw) if raw is not None else letter["body"].encode("utf-8")
    return page(
        request,
        "dead_letter.html",
        dag_id=dag_id,
        pipeline=pipeline,
        letter=letter,
        payload=payload_of(body, size=letter["bytes"], form=form, most=MOST_SHOWN),
        forms=FORMS,
        properties=payload_of(letter["properties"], form="json", most=MOST_PROPERTIES),
    )


async def _listed(
    dag_id: str, pipeline: str, chosen: Filter, *, limit: int, offset: int = 0
) -> dict[str, Any]:
    answer = await CHILDREN.ask(
        *await _command(dag_id, pipeline, "list"),
        *chosen.arguments(),
        "--by-reason",
        f"--seconds={LOOK_SECONDS}",
        f"--limit={limit}",
        f"--offset={offset}",
    )
    found: dict[str, Any] = answer.value
    return {**found, "at": answer.at}


def _number(text: str | None) -> int:
    """The number of a page, from 1."""
    return max(1, int(text)) if text and text.isascii() and text.isdigit() and len(text) < 9 else 1


async def _command(dag_id: str, pipeline: str, action: str) -> list[str]:
    """A command about a pipeline's dead letters.

    :raises HTTPException: 404, if the Dag has no such pipeline.
    """
    return ["dead-letters", action, *await run_in_threadpool(_place, dag_id, pipeline)]


def _place(dag_id: str, name: str) -> list[str]:
    """The arguments that say where a pipeline's dead letters are.

    :raises ChildError: If nobody knows that yet.
    """
    declared = declared_pipelines({dag_id})
    found = [each for each in declared if each.name == name]
    # Of a class that a Dag names as text, the name is known to the class alone.
    nameless = [] if found else [each for each in declared if each.broker is None]
    if not found and not nameless:
        raise HTTPException(404, f"The Dag {dag_id} has no pipeline {name}.")
    references = [reference_of(each) for each in found or nameless]
    if any(map(has_template, references)):
        raise ChildError(UNFILLED)
    arguments = [f"--pipeline={json.dumps(each)}" for each in references]
    if nameless:
        arguments.append(f"--named={_clean(name)}")
    staging = (found or nameless)[0].staging
    if staging is not None and "{{" not in staging:
        arguments.append(f"--staging={staging}")
    return arguments


# -- acting ----------------------------------------------------------------------------------------


@router.post("/requeue", dependencies=[EDITS_RUNS])
async def requeue(request: Request, dag_id: str, pipeline: str, user: GetUserDep) -> HTMLResponse:
    """Send letters back where they came from: first asks, then does it."""
    return await _act(request, dag_id, pipeline, "requeue", str(user.get_name()))


@router.post("/delete", dependencies=[EDITS_RUNS])
async def delete(request: Request, dag_id: str, pipeline: str, user: GetUserDep) -> HTMLResponse:
    """Remove letters for good: first asks, then does it."""
    return await _act(request, dag_id, pipeline, "delete", str(user.get_name()))


async def _act(
    request: Request, dag_id: str, pipeline: str, action: str, user: str
) -> HTMLResponse:
    form = await request.form()
    chosen = Filter.of(form)
    ids = _ids(form)
    facts: dict[str, Any] = {"dag_id": dag_id, "pipeline": pipeline, "action": action}
    facts |= {"chosen": chosen, "ids": ids}
    if form.get("confirmed") != "yes":
        found = None if ids else await _listed(dag_id, pipeline, chosen, limit=1)
        return page(request, "dead_letters_confirm.html", found=found, most=MOST_NAMED, **facts)
    which = [f"--message-id={each}" for each in ids] or chosen.arguments() or ["--all"]
    command = await _command(dag_id, pipeline, action)
    about = {"pipeline": pipeline} | ({"ids": ids} if ids else dict(chosen.items()))
    try:
        answer = await CHILDREN.change(*command, *which, timeout=MOVE_SECONDS)
    except ChildError as error:
        await run_in_threadpool(_note, user, dag_id, action, {**about, "error": str(error)})
        facts |= {"result": None, "count": None, "trouble": str(error)}
        return page(request, "dead_letters_done.html", status=503, most=MOST_NAMED, **facts)
    count = answer.value[_DONE[action]]
    await run_in_threadpool(_note, user, dag_id, action, {**about, "count": count})
    facts |= {"result": answer.value, "count": count, "most": MOST_NAMED}
    return page(request, "dead_letters_done.html", **facts)


def _ids(form: FormData) -> list[str]:
    """The letters that were marked; none, if all are meant that the filter finds.

    :raises HTTPException: 422, if neither is said.
    """
    if form.get("scope") == "all":
        return []
    ids = list(dict.fromkeys(_clean(each) for each in form.getlist("chosen")))
    if not ids or "" in ids:
        raise HTTPException(422, "No letter is marked: mark some, or choose all of them.")
    return ids


def _note(user: str, dag_id: str, action: str, about: dict[str, Any]) -> None:
    """Leave who did what, in the log and in Airflow's audit log."""
    log.info("%s asked to %s dead letters of the Dag %s: %s", user, action, dag_id, about)
    try:
        with create_session() as session:
            session.add(
                Log(
                    event=f"broadway_dead_letters_{action}",
                    dag_id=dag_id,
                    owner=user,
                    owner_display_name=user,
                    extra=json.dumps(about),
                )
            )
    except SQLAlchemyError:
        # It has been done, and the page is to say what came of it.
        log.exception("It could not be written into Airflow's audit log")
