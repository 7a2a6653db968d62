"""The base of the subjects of brokers with receipts: SQS and Pub/Sub."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.testing.crashes.subject import Subject

#: The marker of a generation whose report will be removed some days later.
_ENDED = re.compile(r"/ended/[\d-]+/(\w+)\.json$")


class ReceiptSubject(Subject):
    """A pipeline over a broker with receipts."""

    def staged(self) -> list[str]:
        """Returns staged files, except reports of ended generations, which are removed later."""
        result = super().staged()
        settled_generations = {match[1] for path in result if (match := _ENDED.search(path))}
        return [
            path
            for path in result
            if not any(generation in path for generation in settled_generations)
        ]


def common_options(producer: Producer, actions: Collection[str] | None = None) -> Mapping[str, Any]:
    """Returns the options of the pipeline's producer that every broker supports.

    :param actions: The ``on_success`` and ``on_failure`` actions of the broker; ``None``: all.
    """
    names = ("retry", "concurrency", "transformer", "on_success", "on_failure")
    options = {name: getattr(producer, name) for name in names}
    return {
        name: value
        for name, value in options.items()
        if actions is None or not name.startswith("on_") or value in actions
    }
