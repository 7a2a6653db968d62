"""Settles for producers that ``merge_options`` gives different options, each by its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.producers.rabbitmq.settle.custodian import RabbitCustodian

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions


class ShardedCustodian:
    """A custodian for every producer of a pipeline, told apart by the index that a lease notes."""

    def __init__(self, producer: RabbitMQOptions, env: ProducerEnv) -> None:
        self._producer = producer
        self._env = env
        self._custodians: dict[int, RabbitCustodian] = {}

    def renew(self, lease: Lease) -> Lease | None:
        return self._of(lease).renew(lease)

    def holds(self, lease: Lease) -> bool:
        return self._of(lease).holds(lease)

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        return self._of(lease).settle(lease, settlement)

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        return self._of(lease).settle_now(lease, entries)

    def close(self) -> None:
        for custodian in self._custodians.values():
            custodian.close()
        self._custodians.clear()

    def _of(self, lease: Lease) -> RabbitCustodian:
        index = int(lease.state.get("index", self._env.index))
        if index not in self._custodians:
            self._custodians[index] = RabbitCustodian(self._producer.merged(index), self._env)
        return self._custodians[index]
