"""Lets callbacks in a child process of a task ask Airflow: for connections, variables and the like.

Airflow's supervisor listens to the task's own process alone, by one socket.  So a child sends its
requests to its parent, which asks the supervisor.
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

#: The module where Airflow's SDK looks for its way to the supervisor, and the name there.
_MODULE: Final = "airflow.sdk.execution_time.task_runner"
_NAME: Final = "SUPERVISOR_COMMS"


class _RelayedComms:
    """Stands for Airflow's ``CommsDecoder`` in a child process."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        self._ask = ask

    def send(self, msg: Any) -> Any:
        """Send a request to the supervisor, and return its response."""
        return self._ask(msg)

    async def asend(self, msg: Any) -> Any:
        """The same without blocking the event loop."""
        return await asyncio.to_thread(self._ask, msg)


class _TaskRunnerFinder(MetaPathFinder):
    """Puts the stand-in in its place when that module is imported: most pipelines never do."""

    def __init__(self, comms: _RelayedComms) -> None:
        self._comms = comms

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the one module, by the other finders."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Placing(spec.loader, self._comms)
        return spec


class _Placing(Loader):
    """Loads a module, and puts the stand-in there."""

    def __init__(self, loader: Loader, comms: _RelayedComms) -> None:
        self._loader = loader
        self._comms = comms

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create it as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute it as its own loader does."""
        self._loader.exec_module(module)
        setattr(module, _NAME, self._comms)


def connect(ask: Callable[[Any], Any]) -> None:
    """Have Airflow's SDK in this child process ask by ``ask``."""
    # No task may use the metadata database, and its settings have no address of it.
    os.environ["_AIRFLOW__AS_LIBRARY"] = "1"
    comms, loaded = _RelayedComms(ask), sys.modules.get(_MODULE)
    if loaded is not None:
        setattr(loaded, _NAME, comms)
    else:
        sys.meta_path.insert(0, _TaskRunnerFinder(comms))


def _answer(request: Any) -> Any:
    """Ask the supervisor; in the task's own process."""
    return getattr(sys.modules[_MODULE], _NAME).send(request)


#: For :class:`airflow_broadway.runs.ports.Ports`.
CHILD_HOST: Final = ChildHost(connect=f"{__name__}:connect", answer=_answer)
