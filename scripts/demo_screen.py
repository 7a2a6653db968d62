"""The demo's progress: redrawn on a terminal, otherwise one line per change."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from airflow_broadway.core.custody.protocol import QueueDepth

#: Seconds between two progress lines without a terminal.
INTERVAL = 4.0

_STYLES = {"success": "green", "failed": "red", "running": "cyan", "upstream_failed": "red"}


class Screen:
    """Prints finished steps as lines, and draws the current step below them."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._begun = time.monotonic()
        self._live: Live | None = None
        self._states: dict[str, str] = {}
        self._told = 0.0
        self._last = ""

    def step(self, text: str) -> None:
        """Prints a step."""
        self.close()
        self.console.print(f"{self._clock()}  {text}", markup=False)

    def loading(self, sent: int, wanted: int) -> None:
        """Draws the progress of filling the queue."""
        self._draw(_bar("sent", sent, wanted))

    def running(
        self,
        tasks: Sequence[Mapping[str, Any]],
        depth: QueueDepth,
        *,
        sent: int,
        batches: tuple[int, int],
    ) -> None:
        """Draws a run: its tasks, and the states of the messages.

        :param sent: The number of messages at the start.
        :param batches: The numbers of handled and of planned batches.
        """
        if self.console.is_terminal:
            self._draw(
                Group(
                    _tasks(tasks),
                    _bar("received", sent - depth.ready - depth.delayed, sent),
                    _bar("batches", *batches),
                    _bar("settled", sent - depth.ready - depth.delayed - depth.leased, sent),
                )
            )
            return
        for task in sorted(tasks, key=_order):
            name, state = task_name(task), str(task["state"] or "waiting")
            if self._states.get(name) != state and (state != "waiting" or name in self._states):
                self.step(f"{name}: {state}")
            self._states[name] = state
        text = f"queue: {_waiting(depth)} ready, {depth.leased:,} held, {depth.dead:,} dead letters"
        if batches[1]:
            text += f"; batches: {batches[0]:,} of {batches[1]:,} handled"
        if text != self._last and time.monotonic() - self._told >= INTERVAL:
            self._told, self._last = time.monotonic(), text
            self.step(text)

    def close(self) -> None:
        """Stops drawing.  Safe to repeat."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, what: RenderableType) -> None:
        if not self.console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self.console, transient=True, refresh_per_second=8)
            self._live.start()
        self._live.update(Group(Text(self._clock(), style="dim"), what))

    def _clock(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._begun), 60)
        return f"{minutes}:{seconds:02d}"


def task_name(task: Mapping[str, Any]) -> str:
    """Returns a task instance's display name: without its group, with its map index."""
    name = str(task["task_id"]).removeprefix("broadway.")
    return f"{name}[{task['map_index']}]" if task["map_index"] >= 0 else name


def _order(task: Mapping[str, Any]) -> tuple[int, str]:
    kinds = ("process", "batch", "handle_batches", "ack")
    name = task_name(task)
    return next((n for n, kind in enumerate(kinds) if name.startswith(kind)), len(kinds)), name


def _tasks(tasks: Sequence[Mapping[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 3))
    for task in sorted(tasks, key=_order):
        state = str(task["state"] or "waiting")
        seconds = f"{_seconds(task):.0f} s" if task["start_date"] else ""
        table.add_row(f"  {task_name(task)}", Text(state, style=_STYLES.get(state, "dim")), seconds)
    return table


def _seconds(task: Mapping[str, Any]) -> float:
    if task["duration"] is not None and task["end_date"]:
        return float(task["duration"])
    return (datetime.now(UTC) - datetime.fromisoformat(task["start_date"])).total_seconds()


def _bar(label: str, done: int, total: int) -> Table:
    table = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(total, 1), completed=done, width=40)
    table.add_row(f"  {label:<9}", bar, f"{done:,} of {total:,}")
    return table


def _waiting(depth: QueueDepth) -> str:
    return f"{depth.ready:,}" + (f" (and {depth.delayed:,} later)" if depth.delayed else "")
