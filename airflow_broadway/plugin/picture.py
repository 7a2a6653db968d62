"""Layout of a pipeline's diagram: the position of each stage, and the counts on the arrows.

``templates/_picture.html`` renders it as SVG.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from airflow_broadway.core.custody.report import CLASSES
from airflow_broadway.core.text import pluralize
from airflow_broadway.plugin.declared import PipelineTasks, StageTask
from airflow_broadway.plugin.render import count as format_count
from airflow_broadway.runs.reading.overview import Flow, Overview

#: A task's state in Airflow → its label and tone.
_WORDS: Final = {
    "success": ("done", "good"),
    "failed": ("failed", "bad"),
    "upstream_failed": ("cannot begin", "bad"),
    "running": ("at work", "busy"),
    "restarting": ("restarting", "busy"),
    "deferred": ("waits", "busy"),
    "up_for_reschedule": ("waits", "busy"),
    "up_for_retry": ("retries soon", "warn"),
    "queued": ("queued", ""),
    "scheduled": ("queued", ""),
    "skipped": ("nothing to do", ""),
    "removed": ("removed", ""),
    "none": ("not begun", ""),
}
#: The outcome class of a message → its tone.
TONES: Final = {
    "acked": "good",
    "requeued": "warn",
    "dead_lettered": "bad",
    "left": "",
    "released": "warn",
    "lapsed": "bad",
    "settle_failed": "bad",
    "still_leased": "busy",
}
#: The kind of the run's source → label.
_SOURCES: Final = {
    "archive": "archive",
    "dead_letters": "dead letters",
    "log": "log",
    "run": "past run",
}
_QUEUES: Final = {
    "sqlite": "embedded queue",
    "rabbitmq": "RabbitMQ queue",
    "sqs": "SQS queue",
    "kafka": "Kafka topic",
    "pubsub": "subscription",
}

#: Columns: offset and width.
_QUEUE, _PROCESS, _BATCH, _HANDLE, _END = (0, 170), (254, 200), (538, 160), (784, 176), (1056, 142)
_HIGH: Final = 58
_GAP: Final = 20
_TOP: Final = 6
#: Between the brace and the boxes of the outcome classes.
_BRACE: Final = 14
#: Room for the arrow below all boxes.
_BELOW: Final = 32
#: Batchers with their own box; the others share one.
_MOST: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A stage: a title, a line below it, and its state as a label and a tone."""

    x: int
    y: int
    width: int
    title: str
    line: str = ""
    state: str = ""
    tone: str = ""
    height: ClassVar[int] = _HIGH


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """An arrow between two boxes, with its message count and rate.

    :param below: The height of an arrow that passes below the batchers.
    :param parting: Whether it shares its start with other arrows, rather than its end.
    """

    source: Box
    target: Box
    count: int | None = None
    rate: float | None = None
    live: bool = False
    below: int = 0
    parting: bool = True

    @property
    def _ends(self) -> tuple[int, int, int, int]:
        """The positions of its start and its tip."""
        start, tip = self.source, self.target
        if self.below:
            x1, x2 = start.x + start.width // 2, tip.x + tip.width // 2
            return x1, start.y + start.height, x2, tip.y + tip.height
        return start.x + start.width, start.y + start.height // 2, tip.x, tip.y + tip.height // 2

    @property
    def path(self) -> str:
        """The SVG path: a curve with horizontal ends, or a line below all boxes."""
        x1, y1, x2, y2 = self._ends
        if self.below:
            return f"M{x1} {y1}V{self.below}H{x2}V{y2}"
        middle = (x1 + x2) // 2
        return (
            f"M{x1} {y1}H{x2}" if y1 == y2 else f"M{x1} {y1}C{middle} {y1} {middle} {y2} {x2} {y2}"
        )

    @property
    def label(self) -> tuple[int, int]:
        """The position of its text, where arrows do not overlap."""
        x1, y1, x2, y2 = self._ends
        if self.below:
            return (x1 + x2) // 2, self.below
        share = 0.62 if self.parting else 0.3
        # The curve is flat at its ends.
        curve = share * share * (3 - 2 * share)
        return round(x1 + (x2 - x1) * share), round(y1 + (y2 - y1) * curve)


@dataclass(slots=True, kw_only=True)
class Picture:
    """A diagram, and its text alternative.

    :param brace: The SVG path that joins the outcome classes; empty for a single class.
    """

    width: int = _END[0] + _END[1]
    height: int
    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    brace: str = ""
    sentence: str = ""

    def place(self, column: tuple[int, int], index: int = 0, count: int = 1, **fields: Any) -> Box:
        """Adds a box in the middle of its share of a column."""
        share = (self.height - 2 * _TOP + _GAP) / count
        y = _TOP + round(share * index + (share - _GAP - _HIGH) / 2)
        box = Box(x=column[0], y=y, width=column[1], **fields)
        self.boxes.append(box)
        return box

    def join(self, source: Box, target: Box, count: int | None, **fields: Any) -> None:
        """Adds an arrow."""
        self.arrows.append(Arrow(source=source, target=target, count=count, **fields))


def word_for(state: str | None) -> tuple[str, str]:
    """Returns the label and tone of a task's state in Airflow; empty for an unknown task."""
    return _WORDS.get(state, (state, "")) if state is not None else ("", "")


def _state_of(task: StageTask | None, failed: int, handled: int | None) -> dict[str, Any]:
    """Returns the label and tone of a stage; a finished one's with its failed messages."""
    word, tone = word_for(task.state if task else None)
    if tone == "good" and failed == handled and failed:
        word, tone = "all failed", "bad"
    elif tone == "good" and failed:
        word, tone = f"{word}, {failed:,} failed", "warn"
    return {"state": word, "tone": tone}


def picture_of(overview: Overview | None, tasks: PipelineTasks | None) -> Picture:
    """Lays out the diagram of a run; from its tasks only if nothing has been received."""
    flows = _collect_flows(overview, tasks)
    totals = overview.totals if overview else {}
    # The outcome classes that have messages; the first is always included.
    classes = {
        name: totals.get(name, 0) if overview else None
        for name in CLASSES
        if totals.get(name) or name == "acked"
    }
    rows = max(len(flows), len(classes))
    picture = Picture(height=rows * (_HIGH + _GAP) - _GAP + 2 * _TOP)
    receipts = overview.receipts if overview else ()
    received = _count_received(overview)
    failed = sum(receipt.failed or 0 for receipt in receipts)
    queue = picture.place(_QUEUE, title=_source_label(overview, tasks))
    processes = tasks.of_kind("process", "run") if tasks else []
    receiving = processes[0] if processes else None
    instances = sum(len(task.instances) for task in processes)
    process = picture.place(
        _PROCESS,
        title=receiving.kind if receiving else "process",
        line=f"{instances} tasks" if instances > 1 else "",
        **_state_of(receiving, failed, received),
    )
    rate = sum(receipt.rate or 0.0 for receipt in receipts) or None
    live = any(receipt.live for receipt in receipts)
    picture.join(queue, process, received, rate=rate, live=live)
    ends = [
        picture.place(
            _END,
            index,
            len(classes),
            title=format_count(count),
            line=CLASSES[name],
            tone=TONES[name] if count else "",
        )
        for index, (name, count) in enumerate(classes.items())
    ]
    x = _END[0]
    if len(ends) > 1:
        x -= _BRACE
        ys = [box.y + box.height // 2 for box in ends]
        picture.brace = f"M{x} {ys[0]}V{ys[-1]}" + "".join(f"M{x} {y}h{_BRACE}" for y in ys)
    settled = Box(x=x, y=(picture.height - _HIGH) // 2, width=0, title="")
    _add_batchers(picture, flows, tasks, process, settled)
    if not flows:
        picture.join(process, settled, None)
    elif failed:  # before batching: the arrow passes below the batchers
        picture.join(process, ends[-1], failed, below=picture.height + _BELOW // 2)
        picture.height += _BELOW
    parts = [f"{received:,} messages received" if received is not None else "nothing received yet"]
    parts += [
        f"{flow.staged:,} to batcher {flow.batcher}, {flow.done:,} of {flow.batches:,} batches done"
        for flow in flows
    ]
    parts += [f"{count:,} {CLASSES[name]}" for name, count in classes.items() if count is not None]
    picture.sentence = "; ".join(parts) + "."
    return picture


def _source_label(overview: Overview | None, tasks: PipelineTasks | None) -> str:
    kind = str(overview.source.get("kind", "live")) if overview else "live"
    if kind in _SOURCES:
        return _SOURCES[kind]
    brokers = [receipt.broker for receipt in overview.receipts] if overview else []
    return _QUEUES.get(next(iter(brokers), (tasks.broker if tasks else None) or ""), "queue")


def _count_received(overview: Overview | None) -> int | None:
    if overview is None:
        return None
    if not overview.receipts:
        return overview.totals.get("received", 0)
    known = [r.received for r in overview.receipts if r.received is not None]
    return sum(known) if known else None


def _collect_flows(overview: Overview | None, tasks: PipelineTasks | None) -> list[Flow]:
    """Returns the batchers: those with messages, and those with a task but no messages yet."""
    flows = list(overview.flows) if overview else []
    with_messages = {flow.batcher for flow in flows}
    for name in set((tasks.batchers if tasks else None) or ()) - with_messages:
        flows.append(Flow(batcher=name, staged=0, planned=None, batches=0, done=0, handled=0))
    flows.sort(key=lambda flow: flow.batcher)
    if len(flows) <= _MOST:
        return flows
    flows.sort(key=lambda flow: -flow.staged)
    rest = flows[_MOST - 1 :]
    names = ("staged", "planned", "batches", "done", "handled")
    sums: dict[str, Any] = {name: sum(getattr(flow, name) or 0 for flow in rest) for name in names}
    return [*flows[: _MOST - 1], Flow(batcher=f"{len(rest)} others", **sums)]


def _add_batchers(
    picture: Picture,
    flows: Sequence[Flow],
    tasks: PipelineTasks | None,
    process: Box,
    settled: Box,
) -> None:
    """Adds the boxes of the batchers, and one box for each task that handles batches."""
    groups: dict[str, tuple[StageTask | None, list[tuple[Flow, Box]]]] = {}
    for index, flow in enumerate(flows):
        task = tasks.batch_task(flow.batcher) if tasks else None
        handler = tasks.handling_task(flow.batcher) if tasks else None
        state, tone = word_for(task.state if task else None)
        if flow.planned is not None and handler is task:  # one task does both
            state, tone = "", ""
        line = pluralize(flow.batches, "batch") if flow.batches else ""
        box = picture.place(
            _BATCH, index, len(flows), title=flow.batcher, line=line, state=state, tone=tone
        )
        picture.join(process, box, flow.staged)
        key = handler.task_id if handler else ""
        groups.setdefault(key, (handler, []))[1].append((flow, box))
    for index, (handler, members) in enumerate(groups.values()):
        _add_handler(picture, handler, members, settled, index, len(groups))


def _add_handler(
    picture: Picture,
    task: StageTask | None,
    members: Sequence[tuple[Flow, Box]],
    settled: Box,
    index: int,
    count: int,
) -> None:
    flows = [flow for flow, _ in members]
    done, batches = sum(flow.done for flow in flows), sum(flow.batches for flow in flows)
    handled = sum(flow.handled for flow in flows)
    failed = sum((flow.failed or 0) + (flow.missing or 0) for flow in flows)
    spark = (task is not None and task.kind == "spark") or any(flow.applications for flow in flows)
    box = picture.place(
        _HANDLE,
        index,
        count,
        title="Spark" if spark else "Python" if task is not None else "handle_batch",
        line=f"{done:,} of {batches:,} done" if batches else "",
        **_state_of(task, failed, handled),
    )
    live = done < batches and box.tone == "busy"
    for flow, batcher in members:
        parting, at_work = len(members) == 1, live and flow.done < flow.batches
        picture.join(batcher, box, flow.planned, live=at_work, parting=parting)
    rate = sum(flow.rate or 0.0 for flow in flows) or None
    if rate is None and task is not None and task.seconds and handled:
        rate = handled / task.seconds
    picture.join(box, settled, handled, rate=rate, live=live, parting=count == 1)
