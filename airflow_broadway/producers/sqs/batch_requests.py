"""Batch requests of SQS: ten entries at most, and what its answer says of each.

Only what the answer names as done is done: an entry that it does not name is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.producers.kit.receipts.batch_requests import (
    BatchRequests,
    Call,
    Keyed,
    Refusal,
)
from airflow_broadway.producers.sqs.client import BatchAnswer
from airflow_broadway.producers.sqs.errors import retryable, throttled
from airflow_broadway.producers.sqs.limits import MAX_BATCH

if TYPE_CHECKING:
    from airflow_broadway.core.clock import Clock

__all__ = ["GONE", "batch_requests", "call_of"]

#: Codes that say: this receipt holds the message no longer.
GONE: Final = frozenset(
    {
        "AWS.SimpleQueueService.MessageNotInflight",
        "InvalidParameterValue",
        "MessageNotInflight",
        "ReceiptHandleIsInvalid",
    }
)


def batch_requests(concurrency: int, clock: Clock) -> BatchRequests:
    """Requests of ten entries, so many at a time."""
    return BatchRequests(concurrency, clock, portions=_tens, name="sqs")


def call_of(send: Callable[[Sequence[Any]], BatchAnswer]) -> Call:
    """One batch request of SQS, whose entries are given without their ``Id``."""

    def call(entries: Sequence[Any]) -> Mapping[int, Refusal]:
        answer = send([{"Id": str(place), **entry} for place, entry in enumerate(entries)])
        if len(answer.done) == len(entries) and not answer.failed:
            return {}
        failed = {str(each.get("Id")): each for each in answer.failed}
        return {
            place: _refusal(failed.get(str(place)))
            for place in range(len(entries))
            if str(place) in failed or str(place) not in answer.done
        }

    return call


def _refusal(said: dict[str, Any] | None) -> Refusal:
    """What SQS said of an entry that it did not name as done."""
    if said is None:
        return Refusal("NoAnswer", "SQS did not say what became of it", again=True, unclear=True)
    code, text = str(said.get("Code", "")), str(said.get("Message", ""))
    gone = code in GONE
    again = not gone and retryable(code, bool(said.get("SenderFault", False)))
    # Said of a visibility timeout that is too long, too.
    gone = gone and "Total VisibilityTimeout" not in text
    # An entry that failed within SQS may have been carried out; one that it throttles is not.
    unclear = again and not throttled(code)
    return Refusal(code, text, gone=gone, again=again, unclear=unclear)


def _tens(entries: Iterable[Keyed]) -> Iterator[list[Keyed]]:
    given = iter(entries)
    while request := list(islice(given, MAX_BATCH)):
        yield request
