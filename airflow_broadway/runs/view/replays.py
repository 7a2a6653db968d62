"""Replays of a run: each has a folder of its own beside the run's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from airflow_broadway.runs.inspect import REPLAY_MARK
from airflow_broadway.staging.run_folder import StagedRun

#: Replays of a Dag's runs that are looked at, the newest first.
_MOST: Final = 50
#: What their ids begin with.
_PREFIX: Final = "replay__"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFacts:
    """A replay.

    :param run_id: Its own id, by which its folder is found.
    :param of: The run's.
    :param result: Messages by what became of them; empty while it goes on, or if it died.
    """

    run_id: str
    of: str
    started_at: str
    ended_at: str
    result: Mapping[str, Any]


def replay_in(run: StagedRun) -> ReplayFacts | None:
    """What a replay's own folder says; ``None`` for a run that is no replay."""
    try:
        return _facts(run.files.read(REPLAY_MARK))
    except FileNotFoundError:
        return None


def replays_of(run: StagedRun) -> list[ReplayFacts]:
    """The replays of a run, the newest first."""
    names = [name for name in run.dag.list("") if name.startswith(_PREFIX)]
    newest = sorted(names, reverse=True)[:_MOST]  # names begin with the instant
    marks = run.dag.read_all([f"{name}/{REPLAY_MARK}" for name in newest])
    found = [_facts(text) for _, text in marks if text is not None]
    return [each for each in found if each is not None and each.of == run.run_id]


def _facts(text: str) -> ReplayFacts | None:
    try:
        mark = json.loads(text)
        return ReplayFacts(
            run_id=mark["run_id"],
            of=mark["of"],
            started_at=mark["started_at"],
            ended_at=mark.get("ended_at", ""),
            result=mark.get("result") or {},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # nobody's, or cut by a full disk: `show` says what is wrong with it
