"""moto's server with a clock per queue: ``python -m tests.crashes.moto_clocks``.

The file that is named like the prefix of a queue contains the queue's clock offset in seconds, so
that concurrent cases share a server but not the time.
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


class _ShiftedTime:
    """Replaces the module ``time`` in the server."""

    monotonic, sleep = staticmethod(time.monotonic), staticmethod(time.sleep)

    @staticmethod
    def time() -> float:
        return time.time() + float(getattr(_request, "clock_offset", 0.0))


def _with_queue_clock(method: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """Wraps a backend method so that it uses the clock of the queue, its first argument."""

    @wraps(method)
    def call(self: Any, queue_name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            _request.clock_offset = float((folder / queue_name.partition("-")[0]).read_text())
        except FileNotFoundError:
            _request.clock_offset = 0.0
        return method(self, queue_name, *args, **kwargs)

    return call


def main() -> None:
    """Serves until killed; the arguments are the folder of the offsets, and the port."""
    served: Any = import_module("tests.sqs_moto")
    folder = Path(sys.argv.pop(1))
    serve = served.serve

    def serve_with_clocks(argv: list[str]) -> None:
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
            setattr(backend, name, _with_queue_clock(getattr(backend, name), folder))
        serve(argv)

    served.time, served.serve = _ShiftedTime, serve_with_clocks
    served.main()


if __name__ == "__main__":
    main()
