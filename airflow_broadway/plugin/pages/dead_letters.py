"""A pipeline's dead letters: their count, their list, and runs that requeue or delete them.

The count is the last one reported by a run, trigger or sensor.  With ``[broadway] ask_brokers`` on,
a child process reads the list and payloads from the broker; payloads need permission to edit the
Dag's runs.  A run of the Dag requeues or deletes dead letters, with the rights and the log of a
worker; the entry in Airflow's audit log is written first.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlencode

from airflow.api_fastapi.core_api.datamodels.dag_run import TriggerDAGRunPostBody
from airflow.api_fastapi.core_api.routes.public.dag_run import trigger_dag_run
from airflow.api_fastapi.core_api.security import GetUserDep
from airflow.models.dagbag import DBDagBag
from airflow.utils.session import create_session
from fastapi import APIRouter, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from starlette.datastructures import FormData

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.model.run_source import DEAD_LETTERS
from airflow_broadway.core.text import parse_timestamp
from airflow_broadway.plugin.access import (
    EDITS_RUNS,
    READS_RUNS,
    TRIGGERS_RUNS,
    WITHHELD,
    MayEdit,
    note,
)
from airflow_broadway.plugin.children import CHILDREN, OFF, ChildError, asks_brokers
from airflow_broadway.plugin.declared import Declared, declared_pipelines
from airflow_broadway.plugin.depths import Depth, Reported, depth_of
from airflow_broadway.plugin.reading import READING, seen_root
from airflow_broadway.plugin.render import show_page
from airflow_broadway.runs.backlog.reports import PipelineKey, read_reports
from airflow_broadway.runs.reading.payload import FORMS, payload_of
from airflow_broadway.runs.sources.dead_letters import PARAM

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.models.base_user import BaseUser

router = APIRouter(
    prefix="/dags/{dag_id}/pipelines/{pipeline}/dead-letters", dependencies=[READS_RUNS]
)

Action = Literal["requeue", "delete"]

#: Dead letters on a page.
PAGE: Final = 100
#: Seconds for which dead letters are read; a large backlog is read in part.
LOOK_SECONDS: Final = 10
#: Bytes of a payload that are fetched, and characters that are displayed.
BYTES: Final = 256 * 1024
MOST_SHOWN: Final = 64 * 1024
#: Characters of the properties that are displayed; dead letters named on the confirmation page.
MOST_PROPERTIES: Final = 16 * 1024
MOST_NAMED: Final = 100


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter of dead letters, combined with AND.  Timestamps are in UTC."""

    id: str = ""
    reason: str = ""
    stage: str = ""
    since: str = ""
    until: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Filter:
        """Builds the filter from query parameters or a form.

        :raises HTTPException: 422, if a timestamp is invalid.
        """
        texts = {field.name: _clean(values.get(field.name)).strip() for field in fields(cls)}
        return cls(**texts | {name: _parse_time(name, texts[name]) for name in _TIMES})

    def items(self) -> list[tuple[str, str]]:
        """Returns the fields that are set."""
        return [(name, value) for name, value in asdict(self).items() if value]

    def choice(self) -> dict[str, Any]:
        """Returns the filter as the run param ``dead_letters``."""
        choice: dict[str, Any] = dict(self.items())
        choice |= {name: f"{choice[name]}+00:00" for name in _TIMES if name in choice}
        return choice | {"ids": [choice.pop("id")]} if self.id else choice

    def query(self, **changed: Any) -> str:
        """Returns the filter as a query string."""
        params = {name: value for name, value in (asdict(self) | changed).items() if value}
        return urlencode(params, errors="backslashreplace")


_TIMES: Final = ("since", "until")


def _clean(value: object) -> str:
    text = str(value or "")
    if "\0" in text:
        raise HTTPException(422, "Text must not contain NUL characters.")
    return text


def _parse_time(name: str, text: str) -> str:
    """Returns a timestamp in UTC in the format of a form field, without its zone."""
    try:
        return parse_timestamp(text).replace(tzinfo=None).isoformat() if text else ""
    except ValueError:
        raise HTTPException(422, f"{name} is no timestamp such as 2026-01-31T12:00.") from None


# -- reading ---------------------------------------------------------------------------------------


@router.get("")
async def show_list(
    request: Request, dag_id: str, pipeline: str, may_edit: MayEdit
) -> HTMLResponse:
    """Shows the dead letters that match a filter, in pages, and the count of each reason."""
    filters = Filter.of(request.query_params)
    number = _parse_page_number(request.query_params.get("page"))
    place = await READING(_find_place, dag_id, pipeline)
    listing, trouble = None, ""
    if asks_brokers():
        try:
            question = {"ask": "list", "choice": filters.choice(), "seconds": LOOK_SECONDS}
            question |= {"limit": PAGE, "offset": (number - 1) * PAGE}
            answer = await CHILDREN.ask(question | place.question())
            listing = {**answer.value, "at": answer.at}
        except ChildError as error:
            trouble = str(error) if may_edit else WITHHELD
    if listing:
        for reason in listing["reasons"]:
            # Forms normalize line ends: filter by the first line.
            reason["find"] = next(iter(reason["reason"].strip().splitlines()), "")
    variables: dict[str, Any] = {"dag_id": dag_id, "pipeline": pipeline, "filters": filters}
    variables |= {"may_edit": may_edit, "place": place, "trouble": trouble}
    variables |= {"number": number, "size": PAGE, "listing": listing}
    variables["pages"] = max(1, -(-listing["matching"] // PAGE)) if listing else 1
    status = 503 if trouble else 200
    return await show_page(request, "dead_letters.html", status=status, **variables)


@router.get("/{message_id:path}", dependencies=[EDITS_RUNS])
async def show_one(
    request: Request, dag_id: str, pipeline: str, message_id: str, user: GetUserDep
) -> HTMLResponse:
    """Shows one dead letter with its payload."""
    form = request.query_params.get("as")
    if form not in (None, *FORMS):
        raise HTTPException(422, f"A payload is shown as {', '.join(FORMS)}.")
    place = await READING(_find_place, dag_id, pipeline)
    if not asks_brokers():
        raise ChildError(OFF)
    details = {"pipeline": pipeline, "id": _clean(message_id)}
    await run_in_threadpool(note, user, dag_id, "broadway_dead_letters_show", details)
    question = {"ask": "show", "id": message_id, "bytes": BYTES}
    letter = (await CHILDREN.ask(question | place.question())).value
    if not letter:
        raise HTTPException(404, f"{message_id} is no dead letter, or no more.")
    raw = letter.get("body_base64")
    body = base64.b64decode(raw) if raw is not None else letter["body"].encode("utf-8")
    payload = await run_in_threadpool(
        payload_of, body, size=letter["bytes"], form=form, most=MOST_SHOWN
    )
    properties = await run_in_threadpool(
        payload_of, letter["properties"], form="json", most=MOST_PROPERTIES
    )
    variables: dict[str, Any] = {"dag_id": dag_id, "pipeline": pipeline, "letter": letter}
    variables |= {"payload": payload, "properties": properties, "forms": FORMS}
    return await show_page(request, "dead_letter.html", **variables)


def _parse_page_number(text: str | None) -> int:
    """Parses a page number, from 1."""
    return max(1, int(text)) if text and text.isascii() and text.isdigit() and len(text) < 9 else 1


@dataclass(frozen=True, slots=True)
class Place:
    """Access to a pipeline's dead letters, as last reported."""

    declared: Declared
    reported: Reported

    @property
    def depth(self) -> Depth | None:
        """The reported depth."""
        return depth_of(self.reported, datetime.now(UTC))

    def question(self) -> dict[str, Any]:
        """Returns the part of a question that identifies the producers.

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
        return {"queues": self.reported.queues, "staging": self.declared.staging}


def _find_place(dag_id: str, name: str) -> Place:
    """Returns access to a pipeline's dead letters.

    :raises HTTPException: 404, if the Dag has no such pipeline.
    """
    declared = declared_pipelines({dag_id})
    # If a Dag references the class as text, only its runs know the pipeline's name.
    unnamed = [pipeline for pipeline in declared if pipeline.broker is None]
    match = next((pipeline for pipeline in declared if pipeline.name == name), None)
    key = PipelineKey(name, dag_id)
    for pipeline in [match] if match else unnamed:
        try:
            reported: Reported = read_reports(seen_root(pipeline.staging), [key]).get(key)
        except StagingError:  # there is no root before the first run
            reported = None
        if match or reported is not None:
            return Place(pipeline, reported)
    raise HTTPException(404, f"The Dag {dag_id} has no pipeline {name}, or it never ran.")


# -- actions ---------------------------------------------------------------------------------------


@router.post("/{action:path}", dependencies=[EDITS_RUNS, TRIGGERS_RUNS])
async def act(
    request: Request, dag_id: str, pipeline: str, action: Action, user: GetUserDep
) -> HTMLResponse:
    """Triggers a run that requeues dead letters to their source or deletes them, once confirmed."""
    form = await request.form()
    filters = Filter.of(form)
    ids = _selected_ids(form)
    place = await READING(_find_place, dag_id, pipeline)
    variables: dict[str, Any] = {"dag_id": dag_id, "pipeline": pipeline, "action": action}
    variables |= {"filters": filters, "ids": ids, "most": MOST_NAMED, "place": place}
    if form.get("confirmed") != "yes":
        return await show_page(request, "dead_letters_confirm.html", **variables)
    choice = {"ids": ids} if ids else filters.choice()
    letters = {"pipeline": pipeline, "action": action, **choice}
    variables["run_id"] = await run_in_threadpool(_trigger, request, dag_id, letters, user)
    return await show_page(request, "dead_letters_done.html", **variables)


def _selected_ids(form: FormData) -> list[str]:
    """Returns the selected ids; empty if all dead letters that match the filter are meant.

    :raises HTTPException: 422, if nothing is selected.
    """
    if form.get("scope") == "all":
        return []
    ids = list(dict.fromkeys(_clean(value) for value in form.getlist("chosen")))
    if not ids or "" in ids:
        raise HTTPException(422, "No letter is marked: mark some, or choose all of them.")
    return ids


def _trigger(request: Request, dag_id: str, letters: dict[str, Any], user: BaseUser) -> str:
    """Triggers a run by Airflow's own route, which checks the Dag's settings; returns its id.

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
