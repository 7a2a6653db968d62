"""The boundary of AWS: every operation of botocore, and of aiobotocore, which s3fs uses.

Retries by the client belong to their operation.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from airflow_broadway.testing.crashes.interceptor import Interceptor, replace
from airflow_broadway.testing.crashes.points import Fault

#: Prefixes of operations without effects.
_READ_ONLY = ("Get", "Head", "List", "Describe")
#: Injected errors, in rotation: (code, status); ``None``: the connection is closed.
_ERRORS = (("InternalError", 500), ("ServiceUnavailable", 503), ("ThrottlingException", 400), None)


class Aws:
    """Intercepts requests to the queues and the bucket of a case.

    Half of a batch request has the first half of its entries.

    :param place: The prefix of the case's queues, and the name of its bucket.
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def install(self, interceptor: Interceptor) -> None:
        from botocore.client import BaseClient

        self._interceptor = interceptor
        self._counts: Counter[str] = Counter()
        replace(BaseClient, "_make_api_call", self._sync)
        try:
            aio: Any = import_module("aiobotocore.client")
        except ImportError:  # not installed: no staging in a bucket
            return
        replace(aio.AioBaseClient, "_make_api_call", self._async)

    def _sync(self, do: Any) -> Any:
        def make_api_call(client: Any, operation: str, params: Mapping[str, Any]) -> Any:
            return self._call(
                client, operation, params, lambda kwargs: do(client, operation, kwargs)
            )

        return make_api_call

    def _async(self, do: Any) -> Any:
        async def make_api_call(client: Any, operation: str, params: Mapping[str, Any]) -> Any:
            loop = asyncio.get_running_loop()

            def wait(kwargs: Mapping[str, Any]) -> Any:
                result = do(client, operation, kwargs)
                return asyncio.run_coroutine_threadsafe(result, loop).result()

            # In another thread, so that concurrent work of this loop does not count as nested.
            return await asyncio.to_thread(self._call, client, operation, params, wait)

        return make_api_call

    def _call(
        self,
        client: Any,
        operation: str,
        params: Mapping[str, Any],
        send: Callable[[Mapping[str, Any]], Any],
    ) -> Any:
        count = self._counts[operation]
        self._counts[operation] += 1
        half = _half(params)
        url = client.meta.endpoint_url
        return self._interceptor.call(
            operation,
            self._target(params),
            lambda: send(params),
            half=None if half is None else lambda: send(half),
            changes=not operation.startswith(_READ_ONLY),
            error=lambda: _failed(operation, url, count),
            lost=lambda: _unanswered(url),
            timeout=lambda: _unanswered(url),
            late=True,
            extra=_others(operation, params, send),
        )

    def _target(self, params: Mapping[str, Any]) -> str:
        """Returns the queue, or the object or prefix in the bucket."""
        if "QueueUrl" in params:
            return str(params["QueueUrl"]).rpartition("/")[2].removeprefix(f"{self._place}-")
        names = [
            str(params[name]) for name in ("QueueName", "Key", "Prefix") if params.get(name)
        ] or [item["Key"] for item in params.get("Delete", {}).get("Objects", [])[:1]]
        return names[0].removeprefix(f"{self._place}-") if names else ""


def _half(params: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns a batch request with half of its entries; ``None`` if it cannot be divided."""
    entries = params.get("Entries", ())
    if len(entries) > 1:
        return {**params, "Entries": entries[: len(entries) // 2]}
    delete = params.get("Delete", {})
    objects = delete.get("Objects", ())
    if len(objects) > 1:
        return {**params, "Delete": {**delete, "Objects": objects[: len(objects) // 2]}}
    return None


def _others(
    operation: str, params: Mapping[str, Any], send: Callable[[Mapping[str, Any]], Any]
) -> dict[Fault, Callable[[], Any]]:
    """Returns further faults of a request."""

    def twice() -> Any:
        send({**params})  # a copy: the client replaces the body by a stream
        return send({**params})

    def conflict() -> Any:
        raise _refused(operation, "ConditionalRequestConflict", 409)

    errors: dict[Fault, Callable[[], Any]] = {}
    if not operation.startswith(_READ_ONLY):
        errors[Fault.SENT_TWICE] = twice
    if "IfNoneMatch" in params:
        errors[Fault.CONFLICT] = conflict
    if operation == "ListObjectsV2":
        errors[Fault.STALE] = lambda: _without_newest(send(params))
    return errors


def _without_newest(response: dict[str, Any]) -> dict[str, Any]:
    """Returns a list response without its newest object."""
    contents = response.get("Contents", [])
    newest = max(
        contents, key=lambda version: (version["LastModified"], version["Key"]), default=None
    )
    return {**response, "Contents": [version for version in contents if version is not newest]}


def _failed(operation: str, url: str, configure_subject: int) -> Exception:
    kind = _ERRORS[configure_subject % len(_ERRORS)]
    if kind is None:
        return _error("ConnectionClosedError", endpoint_url=url)
    return _refused(operation, *kind)


def _refused(operation: str, code: str, status: int) -> Exception:
    response = {
        "Error": {"Code": code, "Message": "an injected fault"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return _error("ClientError", response, operation)


def _unanswered(url: str) -> Exception:
    return _error("ReadTimeoutError", endpoint_url=url)


def _error(name: str, *arguments: Any, **options: Any) -> Exception:
    error: Exception = getattr(import_module("botocore.exceptions"), name)(*arguments, **options)
    return error
