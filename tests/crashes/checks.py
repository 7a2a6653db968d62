"""Checks of message order and of the archive at the end of a case."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from airflow_broadway.testing.crashes.account import Account, Violation
from airflow_broadway.testing.crashes.callbacks import RecordedCall
from airflow_broadway.testing.crashes.subject import Subject


def check_archive(
    subject: Subject, ids: Sequence[str], calls: Sequence[RecordedCall], account: Account
) -> None:
    """Checks that settled messages are in the archive, if the pipeline has a local one.

    A subject whose ids are not those of the archive has a method ``archived_id``.
    """
    archive = subject.work / "staging" / subject.pipeline.__name__ / "_archive"
    if subject.pipeline.archive is None or not subject.staging.startswith("file:"):
        return
    from pyarrow import parquet

    archived_id: Any = getattr(subject, "archived_id", lambda row: row["message_id"])
    archived: set[str] = set()
    # Without delta-rs and threads, because this process forks.
    for commit in archive.glob("_delta_log/*.json"):
        for action in map(json.loads, commit.read_text().splitlines()):
            if "add" not in action:
                continue
            path = archive / action["add"]["path"]
            rows = parquet.ParquetFile(path).read(["message_id", "metadata"], use_threads=False)
            archived.update(map(archived_id, rows.to_pylist()))
    for place, key in enumerate(ids):
        if account.outcomes[place] and key not in archived:
            account.add(Violation.LOST, f"{key}, in the archive")


def check_order(
    subject: Subject, ids: Sequence[str], calls: Sequence[RecordedCall], account: Account
) -> None:
    """Checks that the messages of a group are first handled in the order sent.

    A subject with groups has a method ``group_of``: the group of the n-th message.
    """
    group_of: Any = getattr(subject, "group_of", lambda place: None)
    places = {key: place for place, key in enumerate(ids)}
    newest: dict[str, str] = {}
    seen: set[str] = set()
    for call in calls:
        for key, _, _ in call.messages if call.stage == "handle_message" else ():
            group = group_of(places[key]) if key in places else None
            if group is None or key in seen:
                continue
            seen.add(key)
            before = newest.setdefault(group, key)
            if places[before] > places[key]:
                account.add(
                    Violation.OTHER,
                    f"{key} is first handled after {before}, which follows it in group {group}",
                )
            newest[group] = key
