"""The base class of producers that use the custody engine: opens source and custodian."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Mapping
from contextlib import closing
from typing import Any, ClassVar

from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import Custodian, QueueDepth, Source
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.engine.port import Broker


class BrokerProducer(Producer):
    """The options of a producer that uses the custody engine."""

    #: The adapter's class as ``module:name``; imported when it is opened, and the client with it.
    adapter: ClassVar[str]
    keeps_payload: ClassVar[bool] = True
    actions: ClassVar[Mapping[str, Action]] = {**Producer.actions, "release": Action.RELEASE}

    def broker(self, env: ProducerEnv) -> Broker[Any]:
        """Creates the adapter; opens no connection."""
        module, _, name = self.adapter.partition(":")
        broker: Broker[Any] = getattr(importlib.import_module(module), name)(self, env)
        return broker

    def publishes(self, action: Action) -> bool:
        """Returns whether an action publishes a message again: only dead-lettering does."""
        return action is Action.DEAD_LETTER

    def partition_of(self, message: Message) -> int:
        """Returns the same number for all messages of a group, so that they stay in order."""
        group = self.group_of(message)
        return zlib.crc32((message.message_id if group is None else group).encode())

    def prepare_for_start(self, pipeline: Any) -> Mapping[str, Any]:
        """Partitions messages by group to keep order, unless the pipeline sets a partitioning."""
        if not self.keeps_order or pipeline.partition_by is not None:
            return {}
        return {"partition_by": self.partition_of}

    def source(self, env: ProducerEnv) -> Source:
        from airflow_broadway.producers.engine.source import EngineSource

        return EngineSource(self.broker(env))

    def custodian(self, env: ProducerEnv) -> Custodian:
        from airflow_broadway.producers.engine.custodian import EngineCustodian

        return EngineCustodian(self.broker(env))

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
