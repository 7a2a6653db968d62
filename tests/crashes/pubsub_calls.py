"""The boundary of Pub/Sub: every gRPC request of Google's client.

A point is one request.  The package retries requests itself; each retry is another point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from airflow_broadway.testing.crashes.interceptor import Interceptor, replace
from airflow_broadway.testing.crashes.points import Fault

#: Status codes of injected errors, in rotation.
_ERRORS = ("UNAVAILABLE", "INTERNAL", "RESOURCE_EXHAUSTED", "ABORTED")
#: The fields that contain a request's resource.
_NAMES = ("subscription", "topic", "name")


class PubSub:
    """Intercepts every blocking request; half of a request has the first half of its ack ids."""

    def install(self, interceptor: Interceptor) -> None:
        from grpc import _channel

        self._interceptor = interceptor
        self._made: Counter[str] = Counter()
        replace(_channel._UnaryUnaryMultiCallable, "with_call", self._intercept)

    def _intercept(self, do: Any) -> Any:
        def with_call(stub: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            def send(request: Any) -> Any:
                return do(stub, request, *args, **kwargs)

            return self._call(stub._method.decode().rpartition("/")[2], request, send)

        return with_call

    def _call(self, name: str, request: Any, send: Callable[[Any], Any]) -> Any:
        count = self._made[name]
        self._made[name] += 1
        changes = not name.startswith("Get")
        half = _half(request)

        def twice() -> Any:
            send(request)
            return send(request)

        return self._interceptor.call(
            name,
            _target(request),
            lambda: send(request),
            half=None if half is None else lambda: send(half),
            changes=changes,
            error=lambda: _failed(_ERRORS[count % len(_ERRORS)]),
            lost=lambda: _failed("UNAVAILABLE"),
            timeout=lambda: _failed("DEADLINE_EXCEEDED"),
            late=True,
            extra={Fault.SENT_TWICE: twice} if changes else {},
        )


def _target(request: Any) -> str:
    """Returns the subscription or topic without its project."""
    result = next((getattr(request, name) for name in _NAMES if getattr(request, name, "")), "")
    return str(result).rpartition("/")[2]


def _half(request: Any) -> Any:
    """Returns the request with half of its ack ids; ``None`` if it cannot be divided."""
    ids = getattr(request, "ack_ids", ())
    if len(ids) < 2:
        return None
    kind = type(request)
    result = kind.pb(kind())
    result.CopyFrom(kind.pb(request))
    del result.ack_ids[len(ids) // 2 :]
    return kind.wrap(result)


def _failed(code: str) -> Exception:
    import grpc
    from grpc import _channel

    state = _channel._RPCState((), (), (), getattr(grpc.StatusCode, code), "an injected fault")
    failed: Exception = _channel._InactiveRpcError(state)
    return failed
