"""Dead letters in a queue that has a redrive policy itself: each browse counts as a receive."""

from __future__ import annotations

import json
import uuid
from contextlib import closing
from typing import Any

import pytest

from airflow_broadway.core.custody.dead_letters import Choice
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kit.looks import RESERVE
from airflow_broadway.producers.sqs import SqsProducer
from tests.sqs_fixtures import wanted_sqs
from tests.sqs_server import Connections

pytestmark = pytest.mark.broker


def test_browsing_never_redrives_dead_letters(tmp_path):
    # Given a queue of dead letters whose own policy moves messages received five times
    server, limit = wanted_sqs(), 5
    client: Any = server.client()

    def create(name: str, **attributes: str) -> str:
        queue = f"{name}-{uuid.uuid4().hex}"
        return str(client.create_queue(QueueName=queue, Attributes=attributes)["QueueUrl"])

    last = create("last")
    response = client.get_queue_attributes(QueueUrl=last, AttributeNames=["QueueArn"])
    policy = {"deadLetterTargetArn": response["Attributes"]["QueueArn"], "maxReceiveCount": limit}
    dead = create("dead", RedrivePolicy=json.dumps(policy))
    for number in range(3):
        client.send_message(QueueUrl=dead, MessageBody=f"letter {number}")
    producer = SqsProducer(queue_url=create("orders"), dead_letter=dead)
    env = ProducerEnv(connections=Connections(server.url), staging=tmp_path.as_uri())

    # When an operator browses repeatedly
    counts, text = [], ""
    for _ in range(limit + 2):
        with closing(producer.dead_letters(env)) as dead_letters:
            try:
                counts.append(len(list(dead_letters.letters())))
            except ProducerError as error:
                counts.append(0)
                text = str(error)

    # Then the last browses are refused, and no dead letter is moved
    browses = limit - RESERVE
    assert "cannot be listed any more" in text
    name = dead.rpartition("/")[2]
    assert counts == [3] * browses + [0] * (limit + 2 - browses)
    with closing(producer.dead_letters(env)) as dead_letters:
        with pytest.raises(ProducerError, match=f"{name}.*maxReceiveCount is {limit}"):
            dead_letters.delete(Choice(reason="x"))
        assert dead_letters.count() == 3
        assert dead_letters.delete().count == 3
