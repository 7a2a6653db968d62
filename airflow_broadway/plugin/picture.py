"""The pipeline as a drawing: where each stage stands, and which numbers are on the arrows.

Only places and words; ``templates/_picture.html`` makes SVG of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from airflow_broadway.core.custody.report import CLASSES
from airflow_broadway.plugin.render import count as shown
from airflow_broadway.plugin.run_tasks import PipelineTasks, StageTask
from airflow_broadway.runs.reading.overview import Flow, Overview

#: A task's state in Airflow → what it means, and its tone.
_WORDS: Final = {
    "success": ("done", "good"),
    "failed": ("failed", "bad"),
    "upstream_failed": ("cannot begin", "bad"),
    "running": ("at work", "busy"),
    "restarting": ("begins again", "busy"),
    "deferred": ("waits", "busy"),
    "up_for_reschedule": ("waits", "busy"),
    "up_for_retry": ("tries again soon", "warn"),
    "queued": ("queued", ""),
    "scheduled": ("queued", ""),
    "skipped": ("nothing to do", ""),
    "removed": ("removed", ""),
    "none": ("not begun", ""),
}
#: The class of a message → its tone.
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
#: Where messages come from, by the kind of the run's source.
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

#: Columns: where each begins, and how wide it is.
_QUEUE, _PROCESS, _BATCH, _HANDLE, _END = (0, 150), (236, 140), (462, 160), (712, 176), (988, 142)
_WIDTH: Final = 1130
_HIGH: Final = 58
_GAP: Final = 20
_TOP: Final = 6
#: Between the line that holds the classes together and them.
_BRACE: Final = 14
#: Room for the line that goes below all.
_BELOW: Final = 32
#: Batchers that have a place of their own; the others share one.
_MOST: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A stage: a title, a line below it, and its state as a word and a tone."""

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
    """From one box to another, with how many messages went there, and how many a second.

    :param below: How far down a line goes that passes the batchers.
    :param parting: Whether others begin where it begins, rather than end where it ends.
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
        """A line that leaves and arrives level; or one that goes below all, at a height."""
        if self.below:
            return f"M{self.x1} {self.y1}V{self.below}H{self.x2}V{self.y2}"
        middle = (self.x1 + self.x2) // 2
        if self.y1 == self.y2:
            return f"M{self.x1} {self.y1}H{self.x2}"
        return f"M{self.x1} {self.y1}C{middle} {self.y1} {middle} {self.y2} {self.x2} {self.y2}"

    @property
    def label(self) -> tuple[int, int]:
        """Where its words are: where arrows have parted, or have not met yet."""
        if self.below:
            return (self.x1 + self.x2) // 2, self.below
        share = 0.62 if self.parting else 0.3
        # A curve is flatter at its ends than a line.
        curve = share * share * (3 - 2 * share)
        x, y = self.x1 + (self.x2 - self.x1) * share, self.y1 + (self.y2 - self.y1) * curve
        return round(x), round(y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawing, and what it shows in a sentence.

    :param brace: The line that holds the classes together; empty of a single one.
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
        one: Box,
        other: Box,
        count: int | None,
        rate: float | None = None,
        *,
        live: bool,
        parting: bool = True,
    ) -> None:
        self.arrows.append(
            Arrow(
                x1=one.x + one.width,
                y1=one.y + one.height // 2,
                x2=other.x,
                y2=other.y + other.height // 2,
                count=count,
                rate=rate,
                live=live,
                parting=parting,
            )
        )


def word_for(task: StageTask | None) -> tuple[str, str]:
    """What a task's state means, and its tone; nothing of a task that Airflow does not know."""
    if task is None:
        return "", ""
    return _WORDS.get(task.state, (task.state, ""))


def word_of(state: str) -> str:
    """What one state of Airflow's means."""
    return _WORDS.get(state, (state, ""))[0]


def _with_failures(state: tuple[str, str], failed: int, handled: int | None) -> tuple[str, str]:
    """The word and the tone of a stage that is done, and in which messages failed."""
    word, tone = state
    if tone != "good" or not failed:
        return state
    return ("all failed", "bad") if failed == handled else (f"{word}, {failed:,} failed", "warn")


def picture_of(overview: Overview | None, tasks: PipelineTasks | None) -> Picture:
    """The drawing of a run; of one that has received nothing yet by its tasks alone."""
    flows = _flows(overview, tasks)
    classes = _classes(overview)
    rows = max(len(flows), len(classes), 1)
    height = rows * (_HIGH + _GAP) - _GAP + 2 * _TOP
    sheet = _Sheet()
    queue = _box(_QUEUE, height, 0, 1, title=_source(overview, tasks))
    process = _process_box(overview, tasks, height)
    sheet.boxes += [queue, process]
    received = _received(overview)
    going = bool(overview and any(each.live for each in overview.receipts))
    sheet.join(queue, process, received, _total_rate(overview), live=going)
    ends = [
        _box(
            _END,
            height,
            place,
            len(classes),
            title=shown(count),
            line=CLASSES[name],
            tone=TONES[name] if count else "",
        )
        for place, (name, count) in enumerate(classes)
    ]
    handled = _batchers(sheet, flows, tasks, process, height)
    several = len(ends) > 1
    settled = _box((_END[0] - _BRACE * several, 0), height, 0, 1, title="")
    for box, done, rate, live in handled:
        sheet.join(box, settled, done, rate, live=live, parting=len(handled) == 1)
    if not handled:
        sheet.join(process, settled, None, live=False)
    sheet.boxes += ends
    early = sum(each.failed or 0 for each in overview.receipts) if overview else 0
    if early and handled:
        sheet.arrows.append(_early(process, ends[-1], early, height))
    return Picture(
        width=_WIDTH,
        height=height + (_BELOW if early and handled else 0),
        boxes=sheet.boxes,
        arrows=sheet.arrows,
        brace=_brace(ends) if several else "",
        sentence=_sentence(received, flows, classes),
    )


def _early(process: Box, last: Box, count: int, height: int) -> Arrow:
    """Past the batchers: what failed before any batch."""
    return Arrow(
        x1=process.x + process.width // 2,
        y1=process.y + process.height,
        x2=last.x + last.width // 2,
        y2=last.y + last.height,
        count=count,
        below=height + _BELOW // 2,
    )


def _brace(boxes: Sequence[Box]) -> str:
    x, ys = _END[0] - _BRACE, [box.y + box.height // 2 for box in boxes]
    return f"M{x} {ys[0]}V{ys[-1]}" + "".join(f"M{x} {y}h{_BRACE}" for y in ys)


def _box(
    column: tuple[int, int], height: int, place: int, places: int, *, title: str, **about: Any
) -> Box:
    """A box in the middle of its share of a column."""
    share = (height - 2 * _TOP + _GAP) / places
    y = _TOP + round(share * place + (share - _GAP - _HIGH) / 2)
    return Box(x=column[0], y=y, width=column[1], title=title, **about)


def _source(overview: Overview | None, tasks: PipelineTasks | None) -> str:
    kind = str(overview.source.get("kind", "live")) if overview else "live"
    if kind in _SOURCES:
        return _SOURCES[kind]
    brokers = [each.broker for each in overview.receipts] if overview else []
    return _QUEUES.get(next(iter(brokers), tasks.broker if tasks else ""), "queue")


def _process_box(overview: Overview | None, tasks: PipelineTasks | None, height: int) -> Box:
    found = tasks.of_kind("process", "run") if tasks else []
    instances = sum(len(each.instances) for each in found)
    failed = sum(each.failed or 0 for each in overview.receipts) if overview else 0
    word = word_for(found[0] if found else None)
    state, tone = _with_failures(word, failed, _received(overview))
    title = "run" if found and found[0].kind == "run" else "process"
    line = f"{instances} tasks" if instances > 1 else ""
    return _box(_PROCESS, height, 0, 1, title=title, line=line, state=state, tone=tone)


def _received(overview: Overview | None) -> int | None:
    if overview is None:
        return None
    if not overview.receipts:
        return overview.totals.get("received", 0)
    known = [each.received for each in overview.receipts if each.received is not None]
    return sum(known) if known else None


def _total_rate(overview: Overview | None) -> float | None:
    rates = [each.rate for each in overview.receipts if each.rate] if overview else []
    return sum(rates) if rates else None


def _flows(overview: Overview | None, tasks: PipelineTasks | None) -> list[Flow]:
    """The batchers: those with messages, and those that have a task and nothing yet."""
    flows = list(overview.flows) if overview else []
    there = {each.batcher for each in flows}
    for name in (tasks.batchers if tasks else {}).keys() - there:
        nothing = Flow(batcher=name, staged=0, planned=None, batches=0, done=0, handled=0)
        flows.append(nothing)
    flows.sort(key=lambda flow: flow.batcher)
    if len(flows) <= _MOST:
        return flows
    flows.sort(key=lambda flow: -flow.staged)
    rest = flows[_MOST - 1 :]
    others = Flow(
        batcher=f"{len(rest)} others",
        staged=sum(each.staged for each in rest),
        planned=sum(each.planned or 0 for each in rest),
        batches=sum(each.batches for each in rest),
        done=sum(each.done for each in rest),
        handled=sum(each.handled for each in rest),
    )
    return [*flows[: _MOST - 1], others]


def _batchers(
    sheet: _Sheet, flows: Sequence[Flow], tasks: PipelineTasks | None, process: Box, height: int
) -> list[tuple[Box, int, float | None, bool]]:
    """The batchers and who handles their batches: one box for each task that does."""
    groups: dict[str, list[tuple[Flow, Box]]] = {}
    handlers: dict[str, StageTask | None] = {}
    for place, flow in enumerate(flows):
        task = tasks.batch_task(flow.batcher) if tasks else None
        handler = tasks.handling_task(flow.batcher) if tasks else None
        state, tone = word_for(task)
        if flow.planned is not None and handler is task:  # one task does both
            state, tone = "", ""
        made = f"{flow.batches:,} batch{'es' if flow.batches != 1 else ''}" if flow.batches else ""
        box = _box(
            _BATCH, height, place, len(flows), title=flow.batcher, line=made, state=state, tone=tone
        )
        sheet.boxes.append(box)
        sheet.join(process, box, flow.staged, live=False)
        key = handler.task_id if handler else ""
        groups.setdefault(key, []).append((flow, box))
        handlers[key] = handler
    made_boxes = []
    for place, (key, members) in enumerate(groups.items()):
        made_boxes.append(_handle_box(sheet, handlers[key], members, height, place, len(groups)))
    return made_boxes


def _handle_box(
    sheet: _Sheet,
    task: StageTask | None,
    members: Sequence[tuple[Flow, Box]],
    height: int,
    place: int,
    places: int,
) -> tuple[Box, int, float | None, bool]:
    flows = [flow for flow, _ in members]
    done, batches = sum(each.done for each in flows), sum(each.batches for each in flows)
    handled = sum(each.handled for each in flows)
    failed = sum((each.failed or 0) + (each.missing or 0) for each in flows)
    state, tone = _with_failures(word_for(task), failed, handled)
    spark = (task is not None and task.kind == "spark") or any(f.applications for f in flows)
    title = "Spark" if spark else "Python" if task is not None else "handle_batch"
    line = f"{done:,} of {batches:,} done" if batches else ""
    box = _box(_HANDLE, height, place, places, title=title, line=line, state=state, tone=tone)
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
    rates = [each.rate for each in flows if each.rate]
    rate = sum(rates) if rates else None
    if rate is None and task is not None and task.seconds and handled:
        rate = handled / task.seconds
    return box, handled, rate, live


def _classes(overview: Overview | None) -> list[tuple[str, int | None]]:
    """The classes that have messages; ``acked`` always has a place."""
    totals = overview.totals if overview else {}
    known = overview is not None
    return [
        (name, totals.get(name, 0) if known else None)
        for name in CLASSES
        if totals.get(name) or name == "acked"
    ]


def _sentence(
    received: int | None, flows: Sequence[Flow], classes: Sequence[tuple[str, int | None]]
) -> str:
    """The drawing in words."""
    parts = [f"{received:,} messages received" if received is not None else "nothing received yet"]
    parts += [
        f"{flow.staged:,} to batcher {flow.batcher}, {flow.done:,} of {flow.batches:,} batches done"
        for flow in flows
    ]
    parts += [f"{count:,} {CLASSES[name]}" for name, count in classes if count is not None]
    return "; ".join(parts) + "."
