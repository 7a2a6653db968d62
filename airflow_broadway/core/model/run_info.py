"""What a callback may know about the run that it works in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from airflow_broadway.core.model.run_source import RunSource

_INSTANTS = ("logical_date", "data_interval_start", "data_interval_end")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The Airflow run a pipeline works in: the same on worker and Spark driver.

    :param logical_date: Aware UTC; ``None`` where the run has none, as the next two.
    :param params: The run's params, JSON.
    :param try_number: Of the task that runs the callback; 1 at first.
    :param source: Where the run's messages come from; ``source.is_backfill`` says whether they are
        those of a past interval, and ``source.interval`` of which.
    """

    dag_id: str = "local"
    run_id: str = "local"
    logical_date: datetime | None = None
    data_interval_start: datetime | None = None
    data_interval_end: datetime | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    try_number: int = 1
    source: RunSource = field(default_factory=RunSource)

    def to_json(self) -> dict[str, Any]:
        """A JSON value that :meth:`from_json` reads back."""
        value = asdict(self)
        for name in _INSTANTS:
            instant = value[name]
            value[name] = None if instant is None else instant.isoformat()
        return {**value, "source": self.source.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunInfo:
        """Read what :meth:`to_json` wrote."""
        read = dict(value)
        for name in _INSTANTS:
            text = read.get(name)
            read[name] = None if text is None else datetime.fromisoformat(text)
        read["source"] = RunSource.from_json(read.get("source") or {})
        return cls(**read)
