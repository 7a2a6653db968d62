"""Workers that are left alone, or killed at random instants."""

from __future__ import annotations

from tests.faults.found import Found
from tests.faults.rabbitmq_cases.place import Place
from tests.faults.rabbitmq_cases.registry import case
from tests.faults.rabbitmq_cases.working import (
    ends_well,
    finish,
    found_by_workers,
    kill_now_and_then,
    spawn,
)


@case(slow=False)
def nobody_is_killed(place: Place, name: str) -> Found:
    place.fill(3_000)

    finish(place, lease=30.0, most=1_000)

    found = found_by_workers(place, name, 3_000)
    if found.duplicates:
        found.mistakes.append("messages were handled twice although nobody was killed")
    return found


def _killed(place: Place, name: str, kind: str, count: int) -> Found:
    place.fill(count, kind=kind)

    killed = kill_now_and_then(place, lease=30.0, most=500, kills=6, seed=len(kind))

    found = found_by_workers(place, name, count)
    found.killed["worker"] = killed
    return found


@case(slow=False)
def workers_are_killed(place: Place, name: str) -> Found:
    return _killed(place, name, "classic", 4_000)


@case()
def workers_of_a_quorum_queue_are_killed(place: Place, name: str) -> Found:
    return _killed(place, name, "quorum", 4_000)


@case()
def two_work_at_once_on_one_queue(place: Place, name: str) -> Found:
    place.fill(4_000)

    workers = [spawn(place, lease=60.0, most=700, name=each) for each in ("one", "two")]
    for worker in workers:
        ends_well(worker)

    found = found_by_workers(place, name, 4_000)
    if found.duplicates:
        found.mistakes.append("messages were handled twice although nobody was killed")
    return found
