"""The base of producers whose custody is the engine's: opens its halves over the adapter."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import Custodian, QueueDepth, Source
from airflow_broadway.producers.engine.port import Broker


class BrokerProducer(Producer):
    """The options of a producer whose custody is the engine's."""

    def broker(self, env: ProducerEnv) -> Broker[Any]:
        """Makes the adapter; connects to nothing."""
        raise TypeError(f"{type(self).__name__} has no broker")

    def source(self, env: ProducerEnv) -> Source:
        from airflow_broadway.producers.engine.source import EngineSource

        return EngineSource(self, self.broker(env))

    def custodian(self, env: ProducerEnv) -> Custodian:
        from airflow_broadway.producers.engine.custodian import EngineCustodian

        return EngineCustodian(self, self.broker(env))

    def check(self, env: ProducerEnv) -> list[Finding]:
        with closing(self.broker(env)) as broker:
            return broker.check()

    def depth(self, env: ProducerEnv) -> QueueDepth | None:
        with closing(self.broker(env)) as broker:
            return broker.depth()

    def dead_letters(self, env: ProducerEnv, *, place: str | None = None) -> DeadLetters:
        broker = self.broker(env)
        try:
            return broker.dead_letters(place)
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            broker.close()
            raise
