"""Answers one broker query of the API server: JSON on standard input and output.

Producers are built from the options that the last run reported, and only from classes of this
package: no pipeline module is imported.  No option appears on a command line, and error texts
contain no secrets.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Final

from airflow_broadway.adapters.backlog import look_at
from airflow_broadway.adapters.staging import env_outside_run
from airflow_broadway.cli.dead_letters import export_letter, listed_letters, open_letters
from airflow_broadway.cli.depth import DepthQuery
from airflow_broadway.cli.output import only_results_on_stdout, print_json
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.dead_letters import Choice, DeadLetters
from airflow_broadway.core.errors import BroadwayError, ProducerError
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.text import cut, printable
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.runs.sources.dead_letters import choice_of

#: Characters of an error text.
_MAX_ERROR: Final = 600


def main() -> int:
    """Answers the question; the exit code is 0 even if the answer is an error."""
    with only_results_on_stdout():
        try:
            question = json.load(sys.stdin)
            answer = {"answer": _ANSWERS[question["ask"]](question)}
        except (BroadwayError, OSError) as error:
            answer = {"error": cut(redacted(printable(str(error))), _MAX_ERROR)}
        except Exception as error:
            # The text of any other error may hold a secret.
            answer = {"error": f"{type(error).__name__} was raised in the child process"}
        print_json(answer)
    return 0


def _depths(question: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the depth of each pipeline's queues; brokers are queried concurrently."""
    queries = []
    for pipeline in question["queues"]:
        query = DepthQuery(pipeline["key"])
        queries.append(query)
        look = partial(_read_depth, pipeline["queues"], pipeline["staging"])
        threading.Thread(target=query.run, args=(look,), daemon=True).start()
    DepthQuery.wait(queries, question["seconds"], SystemClock())
    return [query.to_json() for query in queries]


def _read_depth(queues: str, staging: str | None) -> Any:
    return look_at(WatchedQueues.loads(queues, own=True), staging)


def _list(question: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a page of dead letters, and the count of each reason."""
    with _open_dead_letters(question) as place:
        return listed_letters(
            place,
            choice_of(question["choice"]),
            limit=question["limit"],
            offset=question["offset"],
            seconds=question["seconds"],
        )


def _show(question: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a dead letter with its payload, truncated; ``None`` if it was moved or deleted."""
    choice = Choice(ids=frozenset([question["id"]]))
    with _open_dead_letters(question) as place, open_letters(place, choice) as letters:
        # A sender may use this id for another message: only the broker's id counts.
        letter = next(
            (candidate for candidate in letters if candidate.message_id == question["id"]), None
        )
    return None if letter is None else export_letter(letter, question["bytes"])


@contextmanager
def _open_dead_letters(question: Mapping[str, Any]) -> Iterator[DeadLetters]:
    queues = WatchedQueues.loads(question["queues"], own=True)
    if len(queues.producers) != 1:
        raise ProducerError(
            "dead letters of several queues are not listed here: use `airflow-broadway"
            " dead-letters` where a worker runs"
        )
    env = env_outside_run(queues.pipeline, question["staging"])
    with closing(queues.producers[0].dead_letters(env)) as letters:
        yield letters


_ANSWERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = {
    "depth": _depths,
    "list": _list,
    "show": _show,
}
