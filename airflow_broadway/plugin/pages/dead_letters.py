"""A pipeline's dead letters: how many there are, which, and the runs that move them.

The number is the last that a run, trigger or sensor reported.  The list, and a payload, are asked
of the broker by a child process where ``[broadway] ask_brokers`` is on; a payload is for those who
may edit the Dag's runs.  What sends letters back or deletes them is a run of the Dag, with the
rights and the log of a worker, and an entry in Airflow's audit log that is written before it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from airflow.api_fastapi.core_api.datamodels.dag_run import TriggerDAGRunPostBody
from airflow.api_fastapi.core_api.routes.public.dag_run import trigger_dag_run
from airflow.models.dagbag import DBDagBag
from airflow.utils.session import create_session
from fastapi import APIRouter, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from starlette.datastructures import FormData

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.model.run_source import DEAD_LETTERS
from airflow_broadway.plugin.access import (
    EDITS_RUNS,
    READS_RUNS,
    TRIGGERS_RUNS,
    WITHHELD,
    GetUserDep,
    MayEdit,
)
from airflow_broadway.plugin.audit import note
from airflow_broadway.plugin.children import CHILDREN, OFF, ChildError, asks_brokers
from airflow_broadway.plugin.declared import declared_pipelines
from airflow_broadway.plugin.depths import Depth, Reported, depth_of
from airflow_broadway.plugin.reading import READING
from airflow_broadway.plugin.render import page
from airflow_broadway.plugin.staged import seen_root
from airflow_broadway.runs.backlog.reports import PipelineKey, read_reports
from airflow_broadway.runs.reading.payload import FORMS, payload_of
from airflow_broadway.runs.sources.dead_letters import DELETE, PARAM, REQUEUE

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.models.base_user import BaseUser

router = APIRouter(
    prefix="/dags/{dag_id}/pipelines/{pipeline}/dead-letters", dependencies=[READS_RUNS]
)

#: Letters on a page.
PAGE: Final = 100
#: Seconds for which letters are looked at: of very many, brokers show some in that time.
LOOK_SECONDS: Final = 10
#: Bytes of a payload that are fetched, and characters that are shown.
BYTES: Final = 256 * 1024
MOST_SHOWN: Final = 64 * 1024
#: Characters of a letter's properties that are shown; and letters that an answer names.
MOST_PROPERTIES: Final = 16 * 1024
MOST_NAMED: Final = 100


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

    def choice(self) -> dict[str, Any]:
        """As the param ``dead_letters`` of a run has it."""
        named = {"reason": self.reason, "stage": self.stage}
        named |= {"since": _utc(self.since), "until": _utc(self.until)}
        ids = {"ids": [self.id]} if self.id else {}
        return {name: value for name, value in named.items() if value} | ids

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
    place = await READING(_place, dag_id, pipeline)
    found, trouble = None, ""
    if asks_brokers():
        try:
            found = await _listed(place, chosen, limit=PAGE, offset=(number - 1) * PAGE)
        except ChildError as error:
            trouble = str(error) if may_edit else WITHHELD
    if found:
        for each in found["reasons"]:
            # A form cannot carry a line's end as it is.
            each["find"] = next(iter(each["reason"].strip().splitlines()), "")
    facts: dict[str, Any] = {"dag_id": dag_id, "pipeline": pipeline, "chosen": chosen}
    facts |= {"may_edit": may_edit, "depth": place.depth, "trouble": trouble, "found": found}
    facts |= {"number": number, "size": PAGE, "reference": place.reference}
    facts["pages"] = max(1, -(-found["matching"] // PAGE)) if found else 1
    status = 503 if trouble else 200
    return await run_in_threadpool(page, request, "dead_letters.html", status=status, **facts)


@router.get("/{message_id:path}", dependencies=[EDITS_RUNS])
async def show_one(
    request: Request, dag_id: str, pipeline: str, message_id: str, user: GetUserDep
) -> HTMLResponse:
    """One letter whole, with its payload."""
    form = request.query_params.get("as")
    if form not in (None, *FORMS):
        raise HTTPException(422, f"A payload is shown as {', '.join(FORMS)}.")
    place = await READING(_place, dag_id, pipeline)
    if not asks_brokers():
        raise ChildError(OFF)
    about = {"pipeline": pipeline, "id": _clean(message_id)}
    await run_in_threadpool(note, user, dag_id, "broadway_dead_letters_show", about)
    question = {"ask": "show", "id": message_id, "bytes": BYTES}
    letter = (await CHILDREN.ask(question | place.question())).value
    if not letter:
        raise HTTPException(404, f"{message_id} is no dead letter, or no more.")
    return await run_in_threadpool(_letter_page, request, dag_id, pipeline, letter, form)


def _letter_page(
    request: Request, dag_id: str, pipeline: str, letter: dict[str, Any], form: str | None
) -> HTMLResponse:
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


async def _listed(place: Place, chosen: Filter, *, limit: int, offset: int = 0) -> dict[str, Any]:
    question = {"ask": "list", "choice": chosen.choice(), "seconds": LOOK_SECONDS}
    question |= {"limit": limit, "offset": offset}
    answer = await CHILDREN.ask(question | place.question())
    return {**answer.value, "at": answer.at}


def _number(text: str | None) -> int:
    """The number of a page, from 1."""
    return max(1, int(text)) if text and text.isascii() and text.isdigit() and len(text) < 9 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a pipeline's dead letters are, as far as it was reported.

    :param staging: The pipeline's staging root, as the Dag names it.
    :param reference: The class, for the command line.
    :param paused: Whether the Dag is.
    """

    staging: str | None
    reference: str
    paused: bool
    reported: Reported
    depth: Depth | None

    def question(self) -> dict[str, Any]:
        """The part of a question that names the producers.

        :raises ChildError: If their options were not reported.
        """
        if isinstance(self.reported, StagingError):
            raise ChildError(str(self.reported))
        if self.reported is None:
            raise ChildError(
                "no run, trigger or sensor has reported the options of its producer yet: the next"
                " run does"
            )
        if not self.reported.queues:
            raise ChildError(self.reported.withheld)
        return {"queues": self.reported.queues, "staging": self.staging}


def _place(dag_id: str, name: str) -> Place:
    """Where a pipeline's dead letters are.

    :raises HTTPException: 404, if the Dag has no such pipeline.
    """
    declared = declared_pipelines({dag_id})
    # Of a class that a Dag names as text, the name is known to its runs alone.
    nameless = [each for each in declared if each.broker is None]
    found = next((each for each in declared if each.name == name), None)
    key = PipelineKey(name, dag_id)
    for each in [found] if found else nameless:
        try:
            reported: Reported = read_reports(seen_root(each.staging), [key]).get(key)
        except StagingError:  # there is no root before the first run
            reported = None
        if found or reported is not None:
            return Place(
                staging=each.staging,
                reference=each.path,
                paused=each.paused,
                reported=reported,
                depth=depth_of(reported, datetime.now(UTC)),
            )
    raise HTTPException(404, f"The Dag {dag_id} has no pipeline {name}, or it never ran.")


# -- acting ----------------------------------------------------------------------------------------


@router.post("/requeue", dependencies=[EDITS_RUNS, TRIGGERS_RUNS])
async def requeue(request: Request, dag_id: str, pipeline: str, user: GetUserDep) -> HTMLResponse:
    """Begin a run that sends letters back where they came from, once that is confirmed."""
    return await _act(request, dag_id, pipeline, REQUEUE, user)


@router.post("/delete", dependencies=[EDITS_RUNS, TRIGGERS_RUNS])
async def delete(request: Request, dag_id: str, pipeline: str, user: GetUserDep) -> HTMLResponse:
    """Begin a run that removes letters for good, once that is confirmed."""
    return await _act(request, dag_id, pipeline, DELETE, user)


async def _act(
    request: Request, dag_id: str, pipeline: str, action: str, user: BaseUser
) -> HTMLResponse:
    form = await request.form()
    chosen = Filter.of(form)
    ids = _ids(form)
    place = await READING(_place, dag_id, pipeline)
    facts: dict[str, Any] = {"dag_id": dag_id, "pipeline": pipeline, "action": action}
    facts |= {"chosen": chosen, "ids": ids, "most": MOST_NAMED, "paused": place.paused}
    facts["depth"] = place.depth
    if form.get("confirmed") != "yes":
        shown = "dead_letters_confirm.html"
        return await run_in_threadpool(page, request, shown, **facts)
    choice = {"ids": ids} if ids else chosen.choice()
    letters = {"pipeline": pipeline, "action": action, **choice}
    run_id = await run_in_threadpool(_triggered, request, dag_id, letters, user)
    facts["run_id"] = run_id
    return await run_in_threadpool(page, request, "dead_letters_done.html", **facts)


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


def _triggered(request: Request, dag_id: str, letters: dict[str, Any], user: BaseUser) -> str:
    """Trigger a run as Airflow's own route does, which checks what a Dag allows; its id.

    :raises HTTPException: If Airflow refuses it, or its audit log cannot be written.
    """
    run_id = f"dead_letters_{letters['action']}__{datetime.now(UTC).isoformat()}"
    note(user, dag_id, f"broadway_dead_letters_{letters['action']}", letters, run_id=run_id)
    conf = {"source": DEAD_LETTERS, PARAM: letters}
    body = TriggerDAGRunPostBody(dag_run_id=run_id, logical_date=None, conf=conf)
    with create_session() as session:
        trigger_dag_run(
            dag_id=dag_id,
            body=body,
            dag_bag=DBDagBag(),
            user=user,
            session=session,
            request=request,
        )
    return run_id
