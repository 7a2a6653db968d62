"""Layout of a pipeline's diagram: the position of each stage, and the counts on the arrows.

``templates/_picture.html`` renders it as SVG.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from airflow_broadway.core.custody.report import CLASSES
from airflow_broadway.plugin.render import count as format_count
from airflow_broadway.plugin.run_tasks import PipelineTasks, StageTask
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
_QUEUE, _PROCESS, _BATCH, _HANDLE, _END = (0, 150), (236, 140), (462, 160), (712, 176), (988, 142)
_WIDTH: Final = 1130
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
    height: int = _HIGH


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """An arrow between two boxes, with its message count and rate.

    :param below: The height of an arrow that passes below the batchers.
    :param parting: Whether it shares its start with other arrows, rather than its end.
    """

    x1: int
    y1: int
    x2: int
    y2: int
    count: int | None = None
    rate: float | None = None
    live: bool = False
    below: int = 0
    parting: bool = True

    @property
    def path(self) -> str:
        """The SVG path: a curve with horizontal ends, or a line below all boxes."""
        if self.below:
            return f"M{self.x1} {self.y1}V{self.below}H{self.x2}V{self.y2}"
        middle = (self.x1 + self.x2) // 2
        if self.y1 == self.y2:
            return f"M{self.x1} {self.y1}H{self.x2}"
        return f"M{self.x1} {self.y1}C{middle} {self.y1} {middle} {self.y2} {self.x2} {self.y2}"

    @property
    def label(self) -> tuple[int, int]:
        """The position of its text, where arrows do not overlap."""
        if self.below:
            return (self.x1 + self.x2) // 2, self.below
        share = 0.62 if self.parting else 0.3
        # The curve is flat at its ends.
        curve = share * share * (3 - 2 * share)
        x, y = self.x1 + (self.x2 - self.x1) * share, self.y1 + (self.y2 - self.y1) * curve
        return round(x), round(y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A diagram, and its text alternative.

    :param brace: The SVG path that joins the outcome classes; empty for a single class.
    """

    width: int
    height: int
    boxes: Sequence[Box]
    arrows: Sequence[Arrow]
    brace: str
    sentence: str


@dataclass(slots=True)
class _Sheet:
    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)

    def join(
        self,
        source: Box,
        target: Box,
        count: int | None,
        rate: float | None = None,
        *,
        live: bool,
        parting: bool = True,
    ) -> None:
        self.arrows.append(
            Arrow(
                x1=source.x + source.width,
                y1=source.y + source.height // 2,
                x2=target.x,
                y2=target.y + target.height // 2,
                count=count,
                rate=rate,
                live=live,
                parting=parting,
            )
        )


def word_for(task: StageTask | None) -> tuple[str, str]:
    """Returns the label and tone of a task's state; empty for a task unknown to Airflow."""
    if task is None:
        return "", ""
    return _WORDS.get(task.state, (task.state, ""))


def word_of(state: str) -> str:
    """Returns the label of a state in Airflow."""
    return _WORDS.get(state, (state, ""))[0]


def _add_failures(state: tuple[str, str], failed: int, handled: int | None) -> tuple[str, str]:
    """Adds failed messages to the label and tone of a finished stage."""
    word, tone = state
    if tone != "good" or not failed:
        return state
    return ("all failed", "bad") if failed == handled else (f"{word}, {failed:,} failed", "warn")


def picture_of(overview: Overview | None, tasks: PipelineTasks | None) -> Picture:
    """Lays out the diagram of a run; from its tasks only if nothing has been received."""
    flows = _collect_flows(overview, tasks)
    classes = _count_classes(overview)
    rows = max(len(flows), len(classes), 1)
    height = rows * (_HIGH + _GAP) - _GAP + 2 * _TOP
    sheet = _Sheet()
    queue = _place_box(_QUEUE, height, 0, 1, title=_source_label(overview, tasks))
    process = _place_process(overview, tasks, height)
    sheet.boxes += [queue, process]
    received = _count_received(overview)
    live = bool(overview and any(receipt.live for receipt in overview.receipts))
    sheet.join(queue, process, received, _total_rate(overview), live=live)
    ends = [
        _place_box(
            _END,
            height,
            place,
            len(classes),
            title=format_count(count),
            line=CLASSES[name],
            tone=TONES[name] if count else "",
        )
        for place, (name, count) in enumerate(classes)
    ]
    handled = _add_batchers(sheet, flows, tasks, process, height)
    several = len(ends) > 1
    settled = _place_box((_END[0] - _BRACE * several, 0), height, 0, 1, title="")
    for box, done, rate, busy in handled:
        sheet.join(box, settled, done, rate, live=busy, parting=len(handled) == 1)
    if not handled:
        sheet.join(process, settled, None, live=False)
    sheet.boxes += ends
    early = sum(receipt.failed or 0 for receipt in overview.receipts) if overview else 0
    if early and handled:
        sheet.arrows.append(_early_failures(process, ends[-1], early, height))
    return Picture(
        width=_WIDTH,
        height=height + (_BELOW if early and handled else 0),
        boxes=sheet.boxes,
        arrows=sheet.arrows,
        brace=_brace_path(ends) if several else "",
        sentence=_describe(received, flows, classes),
    )


def _early_failures(process: Box, last: Box, count: int, height: int) -> Arrow:
    """Returns the arrow of messages that failed before batching; it passes below the batchers."""
    return Arrow(
        x1=process.x + process.width // 2,
        y1=process.y + process.height,
        x2=last.x + last.width // 2,
        y2=last.y + last.height,
        count=count,
        below=height + _BELOW // 2,
    )


def _brace_path(boxes: Sequence[Box]) -> str:
    x, ys = _END[0] - _BRACE, [box.y + box.height // 2 for box in boxes]
    return f"M{x} {ys[0]}V{ys[-1]}" + "".join(f"M{x} {y}h{_BRACE}" for y in ys)


def _place_box(
    column: tuple[int, int], height: int, place: int, places: int, *, title: str, **fields: Any
) -> Box:
    """Returns a box in the middle of its share of a column."""
    share = (height - 2 * _TOP + _GAP) / places
    y = _TOP + round(share * place + (share - _GAP - _HIGH) / 2)
    return Box(x=column[0], y=y, width=column[1], title=title, **fields)


def _source_label(overview: Overview | None, tasks: PipelineTasks | None) -> str:
    kind = str(overview.source.get("kind", "live")) if overview else "live"
    if kind in _SOURCES:
        return _SOURCES[kind]
    brokers = [receipt.broker for receipt in overview.receipts] if overview else []
    return _QUEUES.get(next(iter(brokers), tasks.broker if tasks else ""), "queue")


def _place_process(overview: Overview | None, tasks: PipelineTasks | None, height: int) -> Box:
    processes = tasks.of_kind("process", "run") if tasks else []
    instances = sum(len(task.instances) for task in processes)
    failed = sum(receipt.failed or 0 for receipt in overview.receipts) if overview else 0
    word = word_for(processes[0] if processes else None)
    state, tone = _add_failures(word, failed, _count_received(overview))
    title = "run" if processes and processes[0].kind == "run" else "process"
    line = f"{instances} tasks" if instances > 1 else ""
    return _place_box(_PROCESS, height, 0, 1, title=title, line=line, state=state, tone=tone)


def _count_received(overview: Overview | None) -> int | None:
    if overview is None:
        return None
    if not overview.receipts:
        return overview.totals.get("received", 0)
    known = [r.received for r in overview.receipts if r.received is not None]
    return sum(known) if known else None


def _total_rate(overview: Overview | None) -> float | None:
    rates = [receipt.rate for receipt in overview.receipts if receipt.rate] if overview else []
    return sum(rates) if rates else None


def _collect_flows(overview: Overview | None, tasks: PipelineTasks | None) -> list[Flow]:
    """Returns the batchers: those with messages, and those with a task but no messages yet."""
    flows = list(overview.flows) if overview else []
    with_messages = {flow.batcher for flow in flows}
    for name in (tasks.batchers if tasks else {}).keys() - with_messages:
        empty = Flow(batcher=name, staged=0, planned=None, batches=0, done=0, handled=0)
        flows.append(empty)
    flows.sort(key=lambda flow: flow.batcher)
    if len(flows) <= _MOST:
        return flows
    flows.sort(key=lambda flow: -flow.staged)
    rest = flows[_MOST - 1 :]
    others = Flow(
        batcher=f"{len(rest)} others",
        staged=sum(flow.staged for flow in rest),
        planned=sum(flow.planned or 0 for flow in rest),
        batches=sum(flow.batches for flow in rest),
        done=sum(flow.done for flow in rest),
        handled=sum(flow.handled for flow in rest),
    )
    return [*flows[: _MOST - 1], others]


def _add_batchers(
    sheet: _Sheet, flows: Sequence[Flow], tasks: PipelineTasks | None, process: Box, height: int
) -> list[tuple[Box, int, float | None, bool]]:
    """Adds the boxes of the batchers, and one box for each task that handles batches."""
    groups: dict[str, list[tuple[Flow, Box]]] = {}
    handlers: dict[str, StageTask | None] = {}
    for place, flow in enumerate(flows):
        task = tasks.batch_task(flow.batcher) if tasks else None
        handler = tasks.handling_task(flow.batcher) if tasks else None
        state, tone = word_for(task)
        if flow.planned is not None and handler is task:  # one task does both
            state, tone = "", ""
        line = f"{flow.batches:,} batch{'es' if flow.batches != 1 else ''}" if flow.batches else ""
        box = _place_box(
            _BATCH, height, place, len(flows), title=flow.batcher, line=line, state=state, tone=tone
        )
        sheet.boxes.append(box)
        sheet.join(process, box, flow.staged, live=False)
        key = handler.task_id if handler else ""
        groups.setdefault(key, []).append((flow, box))
        handlers[key] = handler
    handle_boxes = []
    for place, (key, members) in enumerate(groups.items()):
        handle_boxes.append(_add_handler(sheet, handlers[key], members, height, place, len(groups)))
    return handle_boxes


def _add_handler(
    sheet: _Sheet,
    task: StageTask | None,
    members: Sequence[tuple[Flow, Box]],
    height: int,
    place: int,
    places: int,
) -> tuple[Box, int, float | None, bool]:
    flows = [flow for flow, _ in members]
    done, batches = sum(flow.done for flow in flows), sum(flow.batches for flow in flows)
    handled = sum(flow.handled for flow in flows)
    failed = sum((flow.failed or 0) + (flow.missing or 0) for flow in flows)
    state, tone = _add_failures(word_for(task), failed, handled)
    spark = (task is not None and task.kind == "spark") or any(flow.applications for flow in flows)
    title = "Spark" if spark else "Python" if task is not None else "handle_batch"
    line = f"{done:,} of {batches:,} done" if batches else ""
    box = _place_box(_HANDLE, height, place, places, title=title, line=line, state=state, tone=tone)
    sheet.boxes.append(box)
    live = done < batches and tone == "busy"
    for flow, batcher in members:
        sheet.join(
            batcher,
            box,
            flow.planned,
            live=live and flow.done < flow.batches,
            parting=len(members) == 1,
        )
    rates = [flow.rate for flow in flows if flow.rate]
    rate = sum(rates) if rates else None
    if rate is None and task is not None and task.seconds and handled:
        rate = handled / task.seconds
    return box, handled, rate, live


def _count_classes(overview: Overview | None) -> list[tuple[str, int | None]]:
    """Returns the outcome classes that have messages; ``acked`` is always included."""
    totals = overview.totals if overview else {}
    known = overview is not None
    return [
        (name, totals.get(name, 0) if known else None)
        for name in CLASSES
        if totals.get(name) or name == "acked"
    ]


def _describe(
    received: int | None, flows: Sequence[Flow], classes: Sequence[tuple[str, int | None]]
) -> str:
    """Returns the text alternative of the diagram."""
    parts = [f"{received:,} messages received" if received is not None else "nothing received yet"]
    parts += [
        f"{flow.staged:,} to batcher {flow.batcher}, {flow.done:,} of {flow.batches:,} batches done"
        for flow in flows
    ]
    parts += [f"{count:,} {CLASSES[name]}" for name, count in classes if count is not None]
    return "; ".join(parts) + "."
