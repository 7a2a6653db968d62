"""Rare garbage collections while messages are handled; later the settings are as before."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from airflow_broadway.core import collector
from airflow_broadway.core.collector import collect_after_batch, look_after, rare_collections
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.runs.tasks import UnstagedTask
from tests.unit.runs.steps import PlainSums, Run, Sums


@pytest.fixture(autouse=True)
def as_before():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_collections_are_rare_and_skip_existing_objects():
    before = gc.get_threshold()

    @rare_collections()
    def fails():
        assert gc.get_threshold() == (50_000, *before[1:])
        assert gc.get_freeze_count() > 1_000
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("own", [0, 90_000])
def test_own_settings_of_the_process_are_kept(own):
    gc.set_threshold(own, 3, 4)
    gc.freeze()
    with rare_collections():
        assert gc.get_threshold() == (own, 3, 4)
    assert gc.get_threshold() == (own, 3, 4)
    assert gc.get_freeze_count() > 0


class Ring:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


class LeavingRings(Sums):
    """Callbacks that leave reference cycles, and look at the collector."""

    rings: ClassVar[list[weakref.ref[Ring]]] = []
    most: ClassVar[int] = 0
    thresholds: ClassVar[set[int]] = set()

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        self.rings.append(weakref.ref(Ring()))
        self.thresholds.add(gc.get_threshold()[0])
        alive = sum(ring() is not None for ring in self.rings)
        LeavingRings.most = max(self.most, alive)
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return [self.handle_message("", message, context) for message in messages]


@pytest.mark.parametrize("staged", [True, False])
def test_cycles_of_callbacks_are_collected_rarely_but_bounded_by_bytes(
    tmp_path, monkeypatch, staged
):
    monkeypatch.setattr(collector, "_BYTES", 100)
    monkeypatch.setattr(collector, "_SHARE", float("inf"))
    monkeypatch.setattr(collector, "_not_before", 0.0)
    monkeypatch.setattr(LeavingRings, "rings", [])
    monkeypatch.setattr(LeavingRings, "most", 0)
    monkeypatch.setattr(LeavingRings, "thresholds", set())
    before = gc.get_threshold()
    kinds = (LeavingRings,) if staged else (LeavingRings, PlainSums)  # without batchers
    run = Run(tmp_path, pipeline=type("Leaving", kinds, {"name": "Sums"}), numbers=range(400))
    if staged:
        run.all()
    else:
        UnstagedTask(run.staged, run.pipeline, run.task(), run.ports, budget=Budget()).run()
    assert 0 < LeavingRings.most < 300 < len(LeavingRings.rings)
    assert LeavingRings.thresholds == {50_000}
    assert gc.get_threshold() == before


def test_collection_runs_after_a_number_of_bytes():
    with rare_collections():
        ring = weakref.ref(Ring())
        assert look_after(collector._BYTES - 1, 0) == 0
        assert ring() is not None
        assert look_after(collector._BYTES, 0) == collector._BYTES
        assert ring() is None
    ring = weakref.ref(Ring())
    assert look_after(collector._BYTES, 0) == collector._BYTES
    assert ring() is not None


def test_collections_after_batches_take_a_twentieth_of_the_time(monkeypatch):
    clock = iter([100.0, 102.0, 141.9, 142.0, 143.0])  # a collection takes from 100 to 102
    monkeypatch.setattr(collector, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(collector, "_not_before", 0.0)
    alive = []
    with rare_collections():
        for _ in range(3):
            ring = weakref.ref(Ring())
            collect_after_batch()
            alive.append(ring() is not None)
    assert alive == [False, True, False]
    assert next(clock, None) is None
