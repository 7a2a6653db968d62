"""How often the garbage collector looks while messages are handled; afterwards all is as before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from airflow_broadway.core.collector import rare_collections
from airflow_broadway.core.model.message import Message
from tests.unit.runs.steps import Run
from tests.unit.runs.test_process import Breaking


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_it_looks_less_often_and_at_nothing_that_was_there() -> None:
    before = gc.get_threshold()

    @rare_collections()
    def fails() -> None:
        assert gc.get_threshold() == (5_000, *before[1:])
        assert gc.get_freeze_count() > 1_000
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("own", [0, 9_000])
def test_a_process_that_has_set_it_up_keeps_that(own: int) -> None:
    gc.set_threshold(own, 3, 4)
    gc.freeze()
    with rare_collections():
        assert gc.get_threshold() == (own, 3, 4)
    assert gc.get_threshold() == (own, 3, 4)
    assert gc.get_freeze_count() > 0


class Looking(Breaking):
    seen: ClassVar[set[int]] = set()

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        self.seen.add(gc.get_threshold()[0])
        return message


def test_callbacks_of_a_process_task_run_so(tmp_path: Path) -> None:
    Looking.seen.clear()
    before = gc.get_threshold()
    run = Run(tmp_path, pipeline=Looking)
    run.send(range(3))
    run.process()
    assert Looking.seen == {5_000}
    assert gc.get_threshold() == before
