"""moto's server whose queues have clocks of their own: ``python -m tests.crashes.moto_clocks``.

A queue's clock goes by the seconds in the file that is called as its name begins: so many cases
share one server, and none sees the time of another.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

_request = threading.local()


class _Moved:
    """The module ``time``, as the server is to see it."""

    monotonic, sleep = staticmethod(time.monotonic), staticmethod(time.sleep)

    @staticmethod
    def time() -> float:
        return time.time() + float(getattr(_request, "ahead", 0.0))


def _by_its_clock(method: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """A method of the backend that is called with the name of a queue first."""

    @wraps(method)
    def clocked(self: Any, queue_name: str, *args: Any, **given: Any) -> Any:
        try:
            _request.ahead = float((folder / queue_name.partition("-")[0]).read_text())
        except FileNotFoundError:
            _request.ahead = 0.0
        return method(self, queue_name, *args, **given)

    return clocked


def main() -> None:
    """Serve, until killed; the arguments are the clocks' folder and the port."""
    served: Any = import_module("tests.sqs_moto")
    folder = Path(sys.argv.pop(1))
    serve = served.serve

    def serve_by_clocks(argv: list[str]) -> None:
        backend = served.models.SQSBackend
        for name in (
            "change_message_visibility",
            "change_message_visibility_batch",
            "delete_message",
            "delete_message_batch",
            "get_queue_attributes",
            "receive_message",
            "send_message",
            "send_message_batch",
        ):
            setattr(backend, name, _by_its_clock(getattr(backend, name), folder))
        serve(argv)

    served.time, served.serve = _Moved, serve_by_clocks
    served.main()


if __name__ == "__main__":
    main()
