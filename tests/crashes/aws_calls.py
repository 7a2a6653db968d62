"""The boundary of AWS: every request by botocore, and by aiobotocore, which s3fs goes through.

A point is one operation of the client.  What the client sends again by itself is part of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from airflow_broadway.testing.crashes.interceptor import Interceptor, replace
from airflow_broadway.testing.crashes.points import Fault

#: Operations that change nothing begin so.
_LOOKS = ("Get", "Head", "List", "Describe")
#: What an operation raises where it fails, each in turn: (code, status); ``None``: the connection
#: is closed.
_ERRORS = (("InternalError", 500), ("ServiceUnavailable", 503), ("ThrottlingException", 400), None)


class Aws:
    """Requests to one case's queues and buckets.

    Half of a batch request has the first half of its entries.

    :param place: The case's own, as its queues' names begin, and its bucket is called.
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def install(self, interceptor: Interceptor) -> None:
        from botocore.client import BaseClient

        self._interceptor = interceptor
        self._made: Counter[str] = Counter()
        replace(BaseClient, "_make_api_call", self._sync)
        try:
            aio: Any = import_module("aiobotocore.client")
        except ImportError:  # no staging in a bucket here
            return
        replace(aio.AioBaseClient, "_make_api_call", self._async)

    def _sync(self, do: Any) -> Any:
        def make_api_call(client: Any, operation: str, given: Mapping[str, Any]) -> Any:
            return self._call(
                client, operation, given, lambda kwargs: do(client, operation, kwargs)
            )

        return make_api_call

    def _async(self, do: Any) -> Any:
        async def make_api_call(client: Any, operation: str, given: Mapping[str, Any]) -> Any:
            loop = asyncio.get_running_loop()

            def wait(kwargs: Mapping[str, Any]) -> Any:
                result = do(client, operation, kwargs)
                return asyncio.run_coroutine_threadsafe(result, loop).result()

            # In a thread of its own: what else this loop does meanwhile is no part of it.
            return await asyncio.to_thread(self._call, client, operation, given, wait)

        return make_api_call

    def _call(
        self,
        client: Any,
        operation: str,
        given: Mapping[str, Any],
        send: Callable[[Mapping[str, Any]], Any],
    ) -> Any:
        count = self._made[operation]
        self._made[operation] += 1
        half = _half(given)
        url = client.meta.endpoint_url
        return self._interceptor.call(
            operation,
            self._target(given),
            lambda: send(given),
            half=None if half is None else lambda: send(half),
            changes=not operation.startswith(_LOOKS),
            error=lambda: _failed(operation, url, count),
            lost=lambda: _unanswered(url),
            hangs=lambda: _unanswered(url),
            late=True,
            others=_others(operation, given, send),
        )

    def _target(self, given: Mapping[str, Any]) -> str:
        """The queue, or the object or prefix in the bucket."""
        if "QueueUrl" in given:
            return str(given["QueueUrl"]).rpartition("/")[2].removeprefix(f"{self._place}-")
        names = [
            str(given[name]) for name in ("QueueName", "Key", "Prefix") if given.get(name)
        ] or [item["Key"] for item in given.get("Delete", {}).get("Objects", [])[:1]]
        return names[0].removeprefix(f"{self._place}-") if names else ""


def _half(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A batch request with the first half of its entries; ``None`` if it cannot be divided."""
    entries = given.get("Entries", ())
    if len(entries) > 1:
        return {**given, "Entries": entries[: len(entries) // 2]}
    delete = given.get("Delete", {})
    objects = delete.get("Objects", ())
    if len(objects) > 1:
        return {**given, "Delete": {**delete, "Objects": objects[: len(objects) // 2]}}
    return None


def _others(
    operation: str, given: Mapping[str, Any], send: Callable[[Mapping[str, Any]], Any]
) -> dict[Fault, Callable[[], Any]]:
    """Returns further faults of a request."""

    def twice() -> Any:
        send({**given})  # the client makes a stream of the body there, which is read once only
        return send({**given})

    def conflict() -> Any:
        raise _refused(operation, "ConditionalRequestConflict", 409)

    errors: dict[Fault, Callable[[], Any]] = {}
    if not operation.startswith(_LOOKS):
        errors[Fault.SENT_TWICE] = twice
    if "IfNoneMatch" in given:
        errors[Fault.CONFLICT] = conflict
    if operation == "ListObjectsV2":
        errors[Fault.STALE] = lambda: _without_newest(send(given))
    return errors


def _without_newest(answer: dict[str, Any]) -> dict[str, Any]:
    """A list as it was before the newest object was there."""
    there = answer.get("Contents", [])
    newest = max(there, key=lambda version: (version["LastModified"], version["Key"]), default=None)
    return {**answer, "Contents": [version for version in there if version is not newest]}


def _failed(operation: str, url: str, made: int) -> Exception:
    kind = _ERRORS[made % len(_ERRORS)]
    if kind is None:
        return _error("ConnectionClosedError", endpoint_url=url)
    return _refused(operation, *kind)


def _refused(operation: str, code: str, status: int) -> Exception:
    answer = {
        "Error": {"Code": code, "Message": "struck"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return _error("ClientError", answer, operation)


def _unanswered(url: str) -> Exception:
    return _error("ReadTimeoutError", endpoint_url=url)


def _error(name: str, *arguments: Any, **options: Any) -> Exception:
    error: Exception = getattr(import_module("botocore.exceptions"), name)(*arguments, **options)
    return error
