"""Findings of a check: problems that would stop the next run or make it log a warning."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from airflow_broadway.core.errors import ProducerError

Level = Literal["error", "warning", "note"]

_LOG_LEVELS: Final = {"warning": logging.WARNING, "note": logging.INFO}


class Finding(NamedTuple):
    """One result of a check.

    :param level: ``error``: a run cannot begin; ``warning``: a run begins and logs it; ``note``:
        a fact, or not checked; no run depends on it.
    :param text: One sentence that names the resource, the rule, its value and the way out.
    """

    level: Level
    text: str


def enforce(findings: Iterable[Finding], logger: logging.Logger) -> None:
    """Logs warnings and notes, and raises errors.

    :raises ProducerError: If there is an error; with the text of the first.
    """
    errors = []
    for finding in findings:
        if finding.level == "error":
            errors.append(finding.text)
        else:
            logger.log(_LOG_LEVELS[finding.level], "%s", finding.text)
    if errors:
        more = f" (and {len(errors) - 1} more: `airflow-broadway check`)" if errors[1:] else ""
        raise ProducerError(f"{errors[0]}{more}")
