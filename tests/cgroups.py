"""Control groups that bound the memory of processes, where this machine lets tests make one."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


class MemoryGroup:
    """One control group."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, pid: int) -> None:
        """Bound the memory of a process, and of those that it will start."""
        (self.path / "cgroup.procs").write_text(str(pid))


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """A group of processes that may have so many bytes together; else the OOM killer ends one.

    The test is skipped where none can be made.
    """
    parent, name = (_V1, "memory.limit_in_bytes") if _V1.is_dir() else (_V2, "memory.max")
    path = parent / f"airflow-broadway-{uuid.uuid4().hex[:8]}"
    try:
        path.mkdir()
        (path / name).write_text(str(limit))
    except OSError as error:
        if path.is_dir():
            path.rmdir()
        pytest.skip(f"no control group for memory can be made here: {error}")
    try:
        yield MemoryGroup(path)
    finally:
        for _ in range(100):
            try:
                path.rmdir()
                break
            except OSError:  # its processes are ending
                time.sleep(0.05)


def prefer_to_kill() -> None:
    """Have the OOM killer choose this process."""
    Path(f"/proc/{os.getpid()}/oom_score_adj").write_text("1000")
