"""The common part of subjects whose messages are held by receipts: SQS and Pub/Sub."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.testing.crashes.subject import Subject

#: Says that a generation's report is to be removed some days later.
_ENDED = re.compile(r"/ended/[\d-]+/(\w+)\.json$")


class OverReceipts(Subject):
    """A pipeline over such a broker."""

    def staged(self) -> list[str]:
        """Without what stands to be removed: the reports of generations that have ended."""
        result = super().staged()
        ended = {item[1] for path in result if (item := _ENDED.search(path))}
        return [path for path in result if not any(end in path for end in ended)]


def declared(producer: Producer, actions: Collection[str] | None = None) -> Mapping[str, Any]:
    """The options of a pipeline's own producer that hold over any broker.

    :param actions: Those of the broker, if it lacks some.
    """
    names = ("retry", "concurrency", "transformer", "on_success", "on_failure")
    options = {name: getattr(producer, name) for name in names}
    return {
        name: value
        for name, value in options.items()
        if actions is None or not name.startswith("on_") or value in actions
    }
