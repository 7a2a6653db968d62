"""Opens the source and the custodian of Apache Kafka."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Custodian, QueueDepth, Source
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import options
from airflow_broadway.producers.kafka.options import KafkaOptions


@options
class KafkaProducer(KafkaOptions):
    """The producer for topics of Apache Kafka; see ``docs/kafka.md``.

    Broadway acknowledges success and failure alike.  Here ``on_success`` and ``on_failure`` accept
    ``"ack"``, ``"retry"`` (by the option ``retry``: in place, or with ``order="none"`` by the retry
    topic), ``"dead_letter"`` (to ``dead_letter``) and ``"halt"``, which settles nothing behind the
    message in its group and fails the run.
    """

    def source(self, env: ProducerEnv) -> Source:
        from airflow_broadway.producers.kafka.source import KafkaSource

        return KafkaSource(self, env)

    def custodian(self, env: ProducerEnv) -> Custodian:
        from airflow_broadway.producers.kafka.custodian import KafkaCustodian

        return KafkaCustodian(self, env)

    def check(self, env: ProducerEnv) -> list[Finding]:
        from airflow_broadway.producers.kafka.inspect import check

        return check(self, env)

    def depth(self, env: ProducerEnv) -> QueueDepth | None:
        from airflow_broadway.producers.kafka.inspect import depth

        return depth(self, env)

    def datasets(self, env: ProducerEnv) -> Sequence[tuple[str, str]]:
        from airflow_broadway.producers.kafka.client import settings_of

        server = settings_of(self, env)["bootstrap.servers"].partition(",")[0].strip()
        return [(f"kafka://{server}", topic) for topic in self.topics]

    def count_interval(self, env: ProducerEnv) -> int | None:
        from airflow_broadway.producers.kafka.inspect import count_interval

        return count_interval(self, env)

    def sent_back_as(self, message: Message) -> str | None:
        from airflow_broadway.producers.kafka.records import REQUEUED

        marks = [value for name, value in message.metadata["headers"] if name == REQUEUED]
        return marks[-1] if marks else None

    def dead_letters(self, env: ProducerEnv, *, place: str | None = None) -> DeadLetters:
        from airflow_broadway.producers.kafka.letters import KafkaDeadLetters

        return KafkaDeadLetters(self, env, place)
