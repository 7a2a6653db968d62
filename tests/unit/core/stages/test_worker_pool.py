from __future__ import annotations

import threading
import time
from unittest import mock

import pytest

from airflow_broadway.core.stages.worker_pool import WorkerPool


def drained(pool: WorkerPool[int, int]) -> list[tuple[int, int]]:
    results = []
    while pool.under_way:
        pool.wait(5.0)
        results += pool.take()
    return results


def test_results_are_in_order_of_input():
    def work(piece):
        time.sleep(0.03 if piece == 0 else 0)
        return piece * 10

    pool = WorkerPool([work] * 3)
    for piece in range(8):
        assert pool.put(piece)
    assert drained(pool) == [(piece, piece * 10) for piece in range(8)]
    pool.close()


def test_first_pieces_go_to_one_worker_each():
    gate = threading.Event()
    seen: list[int] = []

    def worker(index):
        def work(piece):
            seen.append(index)
            gate.wait(5.0)
            return piece

        return work

    pool = WorkerPool([worker(index) for index in range(4)])
    for piece in range(4):
        assert pool.put(piece, timeout=1.0)
    assert not pool.put(4, timeout=0.01)  # all are busy: nothing is queued behind one
    gate.set()
    drained(pool)
    assert sorted(seen) == [0, 1, 2, 3]
    pool.close()


def test_pieces_of_a_lane_or_key_are_handled_in_order():
    running: set[int] = set()
    order: list[tuple[int, int]] = []
    lock = threading.Lock()

    def work(piece):
        lane = piece % 3
        with lock:
            assert lane not in running
            running.add(lane)
        time.sleep(0.001)
        with lock:
            running.discard(lane)
            order.append((lane, piece))
        return piece

    for by_key in (False, True):
        order.clear()
        pool = WorkerPool([work] * 3, ordered=False)
        for piece in range(30):
            lane = piece % 3
            pool.put(piece, None if by_key else lane, keys=[lane] if by_key else ())
            pool.take()
        drained(pool)
        pool.close()
        for lane in range(3):
            assert [piece for other, piece in order if other == lane] == [*range(lane, 30, 3)]


def test_interrupt_of_a_worker_is_raised_by_put_and_take():
    pool = WorkerPool([mock.Mock(side_effect=KeyboardInterrupt)] * 2)
    pool.put(1)
    pool.wait(5.0)
    with pytest.raises(KeyboardInterrupt):
        pool.put(2)
    with pytest.raises(KeyboardInterrupt):
        pool.take()
    pool.close()


def test_unread_results_hold_the_feeder_back():
    pool = WorkerPool([lambda piece: piece] * 2, unread=2)
    put = 0
    while pool.put(put, timeout=1.0):
        put += 1
    assert put == 4
    pool.take()
    assert pool.put(put, timeout=30.0)
    pool.close()
