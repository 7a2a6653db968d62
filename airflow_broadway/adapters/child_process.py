"""Lets callbacks in a task's child process use Airflow: connections, variables and the like.

Airflow's supervisor serves the task's own process only, over one socket.  So a child sends its
requests to its parent, which forwards them to the supervisor.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from airflow_broadway.core.stages.child_host import ChildHost

#: The module and name of the Airflow SDK's connection to the supervisor.
_MODULE: Final = "airflow.sdk.execution_time.task_runner"
_NAME: Final = "SUPERVISOR_COMMS"


class _RelayedComms:
    """A replacement for Airflow's ``CommsDecoder`` in a child process."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        self._ask = ask

    def send(self, msg: Any) -> Any:
        """Sends a request to the supervisor, and returns its response."""
        return self._ask(msg)

    async def asend(self, msg: Any) -> Any:
        """Sends a request without blocking the event loop."""
        return await asyncio.to_thread(self._ask, msg)


class _TaskRunnerImporter(MetaPathFinder, Loader):
    """Sets the replacement in the module when it is imported: most pipelines never import it."""

    def __init__(self, comms: _RelayedComms) -> None:
        self._comms = comms

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds the one module, with the other finders."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Executes it with its own loader, and sets the replacement."""
        self._loader.exec_module(module)
        setattr(module, _NAME, self._comms)


def connect(ask: Callable[[Any], Any]) -> None:
    """Makes Airflow's SDK in this child process send its requests with ``ask``."""
    # A task may not use the metadata database, and its settings have no address of it.
    os.environ["_AIRFLOW__AS_LIBRARY"] = "1"
    comms, loaded = _RelayedComms(ask), sys.modules.get(_MODULE)
    if loaded is not None:
        setattr(loaded, _NAME, comms)
    else:
        sys.meta_path.insert(0, _TaskRunnerImporter(comms))


def _forward(request: Any) -> Any:
    """Sends a request to the supervisor, in the task's own process."""
    return getattr(sys.modules[_MODULE], _NAME).send(request)


#: The child host for :class:`airflow_broadway.runs.ports.Ports`.
CHILD_HOST: Final = ChildHost(connect=f"{__name__}:connect", answer=_forward)
