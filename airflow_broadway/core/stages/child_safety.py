"""Ties a child process to its task: it ends with the task, and is the OOM killer's first choice."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import Final

#: prctl(2): sets the signal that this process gets when the thread that started it ends.
_PR_SET_PDEATHSIG: Final = 1
#: Added to this process's OOM badness, in thousandths of all memory: the parent does the settling.
_OOM_SCORE: Final = "1000"


def tie_to_parent(parent: int | None = None) -> None:
    """Makes Linux kill this process when its parent dies, and before its parent if memory runs out.

    Otherwise a killed task would leave a child that still handles messages which the next try
    receives again.  No effect on other systems.

    :param parent: The parent's process id, if it may have died already.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(_OOM_SCORE)
    if parent is not None and os.getppid() != parent:  # it died before this call
        os.kill(os.getpid(), signal.SIGKILL)
