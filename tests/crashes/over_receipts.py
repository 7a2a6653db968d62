"""What subjects have in common whose messages are held by receipts: SQS's and Pub/Sub's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.testing.crashes import Subject

#: Says that a generation's report is to be removed some days later.
_ENDED = re.compile(r"/ended/[\d-]+/(\w+)\.json$")


class OverReceipts(Subject):
    """A pipeline over such a broker."""

    def staged(self) -> list[str]:
        """Without what stands to be removed: the reports of generations that have ended."""
        result = super().staged()
        ended = {each[1] for path in result if (each := _ENDED.search(path))}
        return [path for path in result if not any(end in path for end in ended)]


def declared(producer: Producer) -> Mapping[str, Any]:
    """What of a pipeline's own producer holds over any broker."""
    names = ("retry", "concurrency", "transformer", "on_success", "on_failure")
    return {name: getattr(producer, name) for name in names}
