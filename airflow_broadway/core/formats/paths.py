"""The paths of files in a run's folder; see :mod:`airflow_broadway.core.formats.layout`."""

# ruff: noqa: D103 - layout documents the files

from __future__ import annotations

HEARTBEAT = "heartbeat.json"
GENERATIONS = "generations"
REPORT = "report.json"


def generation(generation: str) -> str:
    return f"generations/{generation}.json"


def manifest(generation: str) -> str:
    return f"{generation}/manifest.json"


def lease(generation: str) -> str:
    return f"{generation}/lease.json"


def live(generation: str) -> str:
    return f"{generation}/live.json"


def in_hand(generation: str) -> str:
    return f"{generation}/in-hand.json"


def intent(generation: str) -> str:
    return f"{generation}/journal-intent.json"


def dead_letters(generation: str) -> str:
    return f"{generation}/journal-letters.json"


def settled(generation: str) -> str:
    return f"{generation}/journal-settled.json"


def outcomes(plan: str) -> str:
    """Returns the folder of a plan's outcomes, shared by later plans of the same generations.

    Plans of other generations use another folder: messages that were redelivered may form the same
    batches, with the same ids, and must be handled again.
    """
    _, _, folder = plan.rpartition("/")[0].partition("/")
    return f"outcomes/{folder}"


def outcome(plan: str, batch_id: str) -> str:
    return f"{outcomes(plan)}/{batch_id}.json"


def split(plan: str, batch_id: str) -> str:
    return f"{outcomes(plan)}/{batch_id}.split"


def prepared(plan: str, batch_id: str, attempt: int) -> str:
    return f"{outcomes(plan)}/{batch_id}.{attempt:06d}.prepared"


def outcome_entries(plan: str, batch_id: str, writer: str) -> str:
    return f"{outcomes(plan)}/{batch_id}.{writer}.entries.jsonl"


def gathered(plan: str, writer: str, number: int) -> str:
    return f"{outcomes(plan)}/gathered-{writer}-{number:04d}.jsonl"


def is_gathered(name: str) -> bool:
    """Returns whether a name in the folder of outcomes is one of :func:`gathered`."""
    return name.startswith("gathered-") and name.endswith(".jsonl")


def of_try(name: str, number: int, folder: str = "work", kind: str = "json") -> str:
    """Returns the path of one of a try's files.

    :param folder: ``work`` for Spark applications, ``tries`` for Python batchers.
    :param kind: ``json`` for its work; ``started``, ``clock`` or ``ended``.
    """
    return f"{folder}/{name}-{number:06d}.{kind}"


def begun(name: str, number: int, folder: str) -> str:
    return f"begun/{folder}/{name}-{number:06d}"


def death(name: str, number: int, folder: str, kind: str = "deaths") -> str:
    """Returns the path of the record of a death, or of an interruption.

    :param kind: ``deaths`` or ``interruptions``.
    """
    return f"{kind}/{folder}/{name}-{number:06d}.json"


def budget(name: str, cleared: int, folder: str) -> str:
    return f"budgets/{folder}/{name}-{cleared:06d}.json"
