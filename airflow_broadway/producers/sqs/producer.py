"""Amazon SQS as a pipeline's producer."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import options
from airflow_broadway.producers.engine.port import Broker
from airflow_broadway.producers.sqs.options import SqsOptions, region_of

#: AWS's consoles, by how the names of their regions begin.
_CONSOLES: Final = {
    "cn-": "amazonaws.cn",
    "us-gov-": "amazonaws-us-gov.com",
    "": "aws.amazon.com",
}


@options
class SqsProducer(SqsOptions):
    """Messages from an Amazon SQS queue, standard or FIFO: see ``docs/sqs.md``.

    ``on_success`` and ``on_failure`` take Broadway's values: ``"ack"``, which deletes, and
    ``"noop"``, after which visibility timeout and redrive policy decide.  Beside them ``"retry"``
    (by the option ``retry``), ``"dead_letter"`` and ``"release"``, at once and without using up an
    attempt.  As in Broadway any other word means ``"noop"``; here with a warning.
    """

    def broker(self, env: ProducerEnv) -> Broker[Any]:
        from airflow_broadway.producers.sqs.adapter import SqsBroker

        return SqsBroker(self, env)

    def console(self, env: ProducerEnv) -> str | None:
        url, region = self.queue_url or "", region_of(self.queue_url or "")
        if region is None:  # another server than AWS's, or nobody knows which account's
            return None
        kind = next((each for each in _CONSOLES if region.startswith(each)), "")
        host = f"{region}.console.{_CONSOLES[kind]}"
        return f"https://{host}/sqs/v3/home?region={region}#/queues/{quote(url, safe='')}"

    def sent_back_as(self, message: Message) -> str | None:
        from airflow_broadway.producers.sqs.dead_letters import sent_back_as

        return sent_back_as(message.acknowledger.data.properties or "")
