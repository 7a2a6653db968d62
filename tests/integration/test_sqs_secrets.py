"""No key of an AWS connection appears in a log, in staging, in an XCom, or in an error."""

from __future__ import annotations

import json
import logging
import traceback
import uuid
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.reference import make_ref
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.runs.process import Process
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from airflow_broadway.testing import ManualClock
from tests.sqs_fixtures import wanted_sqs
from tests.sqs_server import Connections

pytestmark = pytest.mark.broker

SECRETS = {
    "key": "AKIAQ7ZSCANNEDKEYID0",
    "secret": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYSCANNEDKEY",
    "token": "IQoJb3JpZ2luX2VjSCANNEDTOKEN//////////wEaCXVz",
}


def connections(url: str) -> Connections:
    """Returns connections with one try per request: a refused one is reported immediately."""
    return Connections(
        url,
        key={"aws_access_key_id": SECRETS["key"], "aws_secret_access_key": SECRETS["secret"]},
        aws_session_token=SECRETS["token"],
        config_kwargs={"retries": {"total_max_attempts": 1}},
    )


class Orders(Broadway):
    producer = SqsProducer(queue_name="orders", conn_id="aws", receive_interval=0.1)
    batchers = {"default": Batcher()}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if message.data == b"bad":
            raise ValueError("no such article")
        return message


def test_no_key_is_written_anywhere(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "airflow_broadway")
    caplog.set_level(logging.INFO)
    server = wanted_sqs()
    name = f"secrets-{uuid.uuid4().hex}"
    url = server.queue(name)
    for body in ("good", "bad", "good"):
        server.client().send_message(QueueUrl=url, MessageBody=body)
    store = Store.open(f"file://{tmp_path}/staging")
    texts: list[str] = []

    def process(generation: str, **options: Any) -> dict[str, Any] | None:
        """Executes a process task; returns its XCom, or ``None`` if it failed."""
        pipeline = Orders(producer={"queue_name": name, **options})
        texts.append(json.dumps(make_ref(pipeline)) + repr(pipeline.producer))
        clock = ManualClock()
        staged = StagedRun(store, pipeline=pipeline.name, dag_id="d", run_id="r", clock=clock)
        owner = {"dag_id": "d", "run_id": "r", "task_id": "p", "map_index": 0, "try_number": 1}
        env = ProducerEnv(
            pipeline=pipeline.name,
            generation=generation,
            owner=owner,
            clock=clock,
            shared=f"{store.uri}/.shared",
            connections=connections(options.pop("endpoint_url", server.url)),
        )
        texts.append(repr(env))
        try:
            result = Process(staged, pipeline, env=env, budget=Budget(max_messages=3)).run()
            lease = staged.lease(staged.generation(generation))
            custodian = pipeline.producer.custodian(env)
            texts.append(str(custodian.settle(lease, Settlement(rest=RELEASE))))
            custodian.close()
            return result
        except BroadwayError as error:
            texts.append("".join(traceback.format_exception(error)))
            return None

    reference = process("works", on_failure="dead_letter", dead_letter=name)
    assert reference is not None
    assert reference["received"] == 3
    texts.append(json.dumps(reference))
    assert process("no queue", queue_name="nothing-of-that-name") is None
    assert process("out of reach", endpoint_url="http://127.0.0.1:9") is None

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    for kind, secret in SECRETS.items():
        for path in files:
            assert secret.encode() not in path.read_bytes(), (kind, path)
        for text in [*texts, caplog.text]:
            assert secret not in text, kind
    assert "received" in caplog.text.lower()
