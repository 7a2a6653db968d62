"""Ties a child process to its task: it ends with it, and the OOM killer chooses it first."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import Final

#: prctl(2): the signal that this process gets when the thread ends that started it.
_PR_SET_PDEATHSIG: Final = 1
#: Added to the badness of this process, in thousandths of all memory: its parent has the account.
_OOM_SCORE: Final = "1000"


def tie_to_parent(parent: int | None = None) -> None:
    """Have Linux end this process when its parent dies, and before its parent if memory runs out.

    A task that is killed would else leave a child that goes on with messages which the next try
    receives again.  Elsewhere than on Linux nothing happens.

    :param parent: The process id of the parent, where it may have died already.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(_OOM_SCORE)
    if parent is not None and os.getppid() != parent:  # before it was tied
        os.kill(os.getpid(), signal.SIGKILL)
