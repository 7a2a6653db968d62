"""A message that ends its process: its neighbours are handled, and only it is blamed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

from airflow_broadway import Broadway, Message
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.acks import is_settled
from airflow_broadway.core.reference import load_ref
from airflow_broadway.core.stages.child_host import ChildHost
from airflow_broadway.core.stages.isolating_processor import IsolatingProcessor
from airflow_broadway.core.stages.processor_pool import ProcessorPool
from airflow_broadway.core.stages.subprocess_processor import SubprocessProcessor
from airflow_broadway.testing import PipelineDriver
from tests.unit.core.stages._killers import (
    PLACES,
    WAYS,
    Asks,
    Killers,
    KillsAlways,
    KillsInSetup,
    Ordered,
    Partitioned,
    SetupFailsInChildren,
)


def messages_of(data: Sequence[Any]) -> list[Message]:
    driver = PipelineDriver(Killers)
    return [driver.message(part) for part in data]


def suspects_of(data: Sequence[Any]) -> list[Message]:
    return [message.replace(redelivered=True) for message in messages_of(data)]


def handle(
    kind: type[Broadway], data: Sequence[Any], *, enters: bool = False
) -> tuple[list[Message], list[Message]]:
    with closing(IsolatingProcessor(SubprocessProcessor(kind(), enters=enters))) as processor:
        result = processor.handle(messages_of(data))
    return result.successful, result.failed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_only_the_killing_message_fails(place, way):
    kind = Partitioned if place == "partition_by" else Killers
    data = [*range(7), f"{place} {way}", *range(7, 20)]

    successful, failed = handle(kind, data, enters=True)

    assert [message.data for message in successful] == [*range(20)]
    [message] = failed
    assert message.data == f"{place} {way}"
    ending = {"exit": "exit code 3", "segv": "SIGSEGV", "kill": "SIGKILL", "memory": "SIGABRT"}
    assert message.status.kind == "crashed"
    assert message.status.text == (
        f"crashed: it ended 2 processes that handled nothing else, the last with {ending[way]}"
    )


def test_messages_of_a_dead_process_are_marked_redelivered():
    successful, failed = handle(Killers, [1, "handle_message exit", 2])
    assert [message.redelivered for message in (*successful, *failed)] == [True, True, True]
    successful, failed = handle(Killers, [1, "fails", 2])
    assert [message.redelivered for message in (*successful, *failed)] == [False, False, False]


def test_several_killing_messages_are_all_found():
    data = [f"handle_message {WAYS[n % 3]}" if n % 10 == 4 else n for n in range(40)]
    successful, failed = handle(Killers, data)
    assert len(successful) == 36
    assert {message.status.kind for message in failed} == {"crashed"}
    assert len(failed) == 4


def test_message_is_blamed_only_for_its_own_deaths(tmp_path):
    # Given a neighbour that is handled after a death of its own, and one that is blamed
    recovers = (str(tmp_path / "first"), 2)  # once next to the other, once alone
    successful, failed = handle(Killers, [recovers, (str(tmp_path / "second"), 1)])
    assert (len(successful), failed) == (2, [])

    _, failed = handle(Killers, ["handle_message exit"] * 2)
    assert [message.status.text for message in failed] == [
        "crashed: it ended 2 processes that handled nothing else, the last with exit code 3"
    ] * 2


def test_immediately_settled_message_is_not_handled_again():
    successful, failed = handle(Killers, [1, "now", "handle_message exit", "now"])
    # The first "now" was settled in the process that ended: it has no other result.
    assert [(m.data, is_settled(m)) for m in successful] == [(1, False), ("now", True)]
    assert len(failed) == 1


def test_single_message_is_blamed_without_neighbours():
    _, [message] = handle(Killers, ["handle_message kill"])
    assert message.status.kind == "crashed"


def test_process_with_closed_pipe_is_ended_and_its_message_blamed():
    _, [message] = handle(Killers, ["handle_message close"])
    assert message.status.text.endswith("that handled nothing else, the last with a closed pipe")


def test_unreadable_result_fails_its_message_alone():
    successful, failed = handle(Killers, [1, "unreadable", 2])
    assert [message.data for message in successful] == [1, 2]
    [message] = failed
    assert message.status.text == (
        "crashed: it ended 2 processes that handled nothing else, the last with a value that cannot"
        " be read here (ModuleNotFoundError: No module named 'plugin_of_this_process')"
    )


def test_host_that_ends_every_process_blames_two_messages_at_most():
    with pytest.raises(PipelineError, match=r"at every message that it.*no further message"):
        handle(KillsAlways, range(8))


def test_death_in_setup_blames_no_message():
    with pytest.raises(PipelineError, match=r"exit code 7 while it loaded .* handled no message"):
        handle(KillsInSetup, range(8))


def test_new_process_holds_back_the_group_of_a_failure():
    data = ["a1", "b fails", "a dies", "b2", "a3", "c4"]
    successful, failed = handle(Ordered, data)
    assert [message.data for message in successful] == ["a1", "a3", "c4"]
    assert {message.data: message.status.kind for message in failed} == {
        "b fails": "failed",
        "a dies": "crashed",
    }


def test_each_death_is_logged_with_its_messages(caplog):
    with caplog.at_level(logging.WARNING):
        handle(Killers, [1, "handle_message kill"])
    text = [record.getMessage() for record in caplog.records]
    assert len(text) == 3
    assert (
        "ended with SIGKILL while it handled 2 messages: 2 messages ('test-1', 'test-2')"
        in (text[0])
    )
    assert "'test-2', the 1st process of 2 that may end at it" in text[1]
    assert text[2].startswith("Message 'test-2' is dead-lettered, crashed: it ended 2 processes")


# -- suspects --------------------------------------------------------------------------------------


class AllRedelivered:
    """Every redelivered message is a suspect; notes what is in hand."""

    def __init__(self, size: int = 1000, blamed: str = "") -> None:
        self.size, self.blamed = size, blamed
        self.notes: list[list[Any]] = []

    def is_suspect(self, message: Message) -> bool:
        return message.redelivered

    def reason_to_blame(self, message: Message) -> str:
        return "it is known" if message.data == self.blamed else ""

    def portions(self, messages: Sequence[Message]) -> Iterator[list[Message]]:
        for start in range(0, len(messages), self.size):
            yield [*messages[start : start + self.size]]

    def note_in_hand(self, messages: Sequence[Message]) -> None:
        self.notes.append([message.data for message in messages])


class InThreads(Killers):
    def setup(self, run: Any) -> Any:
        return os.getpid()

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return super().handle_message(processor, message, context).put_batch_key(str(context))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_suspects_are_handled_in_a_child_and_others_in_threads(concurrency):
    pipeline = InThreads(processors={"executor": "threads", "concurrency": concurrency})
    fresh = messages_of(["transformed", *range(50)])
    suspects = suspects_of(["transformed", "transformer segv", *range(50, 60)])
    rules = AllRedelivered(size=5)
    with closing(
        ProcessorPool(pipeline, transformer=pipeline.producer.transformer, suspects=rules)
    ) as pool:
        results = list(pool.map([[*suspects[:6], *fresh, *suspects[6:]]]))

    here = {m.data for _, r in results for m in r.successful if m.batch_key == str(os.getpid())}
    apart = {m.data for _, r in results for m in r.successful if m.batch_key != str(os.getpid())}
    assert here == {"transformed!", *range(50)}
    assert apart == {"transformed!", *range(50, 60)}
    assert [m.data for _, r in results for m in r.failed] == ["transformer segv"]
    assert rules.notes == [
        ["transformed", "transformer segv", 50, 51, 52],
        [53, 54, 55, 56, 57],
        [58, 59],
        [],
    ]


def test_known_killer_is_not_handled():
    pipeline = InThreads(processors={"executor": "threads"})
    with closing(ProcessorPool(pipeline, suspects=AllRedelivered(size=1, blamed="known"))) as pool:
        [(chunk, result)] = pool.map([suspects_of(["known"])])
    assert [message.data for message in chunk] == ["known"]
    assert [message.status.text for message in result.failed] == ["crashed: it is known"]


@pytest.mark.parametrize("kind", [Ordered, Partitioned])
def test_ordered_dispatch_with_a_suspect_is_handled_in_a_child(kind):
    pipeline = kind(processors={"executor": "threads", "concurrency": 2})
    messages = messages_of(["a1", "b1", "a2", "b2", "a3", "b3"])
    fresh, dispatch = messages[:2], messages[2:]
    dispatch[2] = dispatch[2].replace(redelivered=True)
    rules = AllRedelivered()
    data = {message.message_id: message.data for message in (*fresh, *dispatch)}
    with closing(ProcessorPool(pipeline, suspects=rules)) as pool:
        results = [result for _, result in pool.map([fresh, dispatch])]
        done = [data[message.message_id] for result in results for message in result.successful]
    assert sorted(done[:2]) == ["a1", "b1"]
    assert done[2:] == ["a2", "b2", "a3", "b3"]
    assert rules.notes == [["a2", "b2", "a3", "b3"], []]


def test_interrupt_amid_suspects_leaves_the_unhandled(monkeypatch):
    pipeline = InThreads(processors={"executor": "threads", "max_demand": 2, "min_demand": 0})
    suspects = suspects_of(range(6))
    pool = ProcessorPool(pipeline, suspects=AllRedelivered(size=2))
    handled: list[Any] = []
    whole = IsolatingProcessor.handle

    def interrupted(self, chunk):
        if chunk[0].data == 4:
            raise KeyboardInterrupt
        return whole(self, chunk)

    monkeypatch.setattr(IsolatingProcessor, "handle", interrupted)

    def run():
        for _, result in pool.map([suspects]):
            handled.extend(message.data for message in result.successful)

    try:
        with pytest.raises(KeyboardInterrupt):
            run()
        done, rest = pool.left()
        handled += [message.data for _, result in done for message in result.successful]
        assert handled == [0, 1, 2, 3]
        assert [message.data for message in rest] == [4, 5]
    finally:
        pool.close()


# -- what a child needs of its parent --------------------------------------------------------------


def test_child_queries_the_host_of_its_parent():
    requests: list[Any] = []

    def answer(request):
        requests.append(request)
        if request == "refused":
            raise LookupError("there is no such thing")
        return f"answer to {request}"

    host = ChildHost(connect=f"{Asks.__module__}:hosts.connect", answer=answer)
    with closing(IsolatingProcessor(SubprocessProcessor(Asks(), host=host))) as processor:
        result = processor.handle(messages_of([1, "refused", 2]))
    assert requests == ["setup", 1, "refused", 2]
    assert [m.data for m in result.successful] == [
        ("answer to setup", "answer to 1"),
        ("answer to setup", "answer to 2"),
    ]
    assert [m.status.text for m in result.failed] == ["LookupError: there is no such thing"]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_suspects_are_handled_by_the_parent_without_a_child(concurrency, monkeypatch, caplog):
    monkeypatch.setenv("PARENT_OF_TESTS", str(os.getpid()))
    pipeline = SetupFailsInChildren(
        processors={"executor": "threads", "concurrency": concurrency, "max_demand": 4}
    )
    rules = AllRedelivered(size=3)
    suspects = suspects_of(range(10))
    fresh = messages_of(range(10, 20))
    with closing(ProcessorPool(pipeline, suspects=rules)) as pool:
        results = list(pool.map([[*suspects, *fresh], []]))
    assert sorted(m.data for _, result in results for m in result.successful) == [*range(20)]
    assert rules.notes == []
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "could be started for them (RuntimeError: the port is taken)" in record.getMessage()


def test_unbatched_results_need_not_be_picklable_in_a_child():
    class_path = "tests.unit.core.stages._processes:WithoutBatchers"
    pipeline = load_ref({"class": class_path, "options": {"processors": {"executor": "threads"}}})
    [message] = suspects_of(["unpicklable"])
    with closing(ProcessorPool(pipeline, suspects=AllRedelivered())) as pool:
        [(_, result)] = pool.map([[message]])
    assert [m.message_id for m in result.successful] == [message.message_id]
