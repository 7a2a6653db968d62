"""How often the garbage collector looks while messages are handled; afterwards all is as before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from airflow_broadway.core import collector
from airflow_broadway.core.collector import look_after, rare_collections
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
        assert gc.get_threshold() == (50_000, *before[1:])
        assert gc.get_freeze_count() > 1_000
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("own", [0, 90_000])
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
    assert Looking.seen == {50_000}
    assert gc.get_threshold() == before


class Ring:
    """Refers to itself: the collector alone frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_it_looks_after_so_many_bytes_unless_the_process_has_its_own_way() -> None:
    with rare_collections():
        ring = weakref.ref(Ring())
        assert look_after(collector._BYTES - 1, 0) == 0
        assert ring() is not None
        assert look_after(collector._BYTES, 0) == collector._BYTES
        assert ring() is None
    ring = weakref.ref(Ring())
    assert look_after(collector._BYTES, 0) == collector._BYTES
    assert ring() is not None


class LeavingRings(Breaking):
    rings: ClassVar[list[weakref.ref[Ring]]] = []
    most: ClassVar[int] = 0

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        self.rings.append(weakref.ref(Ring()))
        left = sum(ring() is not None for ring in self.rings)
        type(self).most = max(self.most, left)
        return message


def test_what_callbacks_leave_behind_in_rings_is_bounded_by_the_bytes_of_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_BYTES", 100)
    run = Run(tmp_path, pipeline=LeavingRings)
    run.send(range(400))
    run.process()
    assert len(LeavingRings.rings) == 400
    assert LeavingRings.most < 200
