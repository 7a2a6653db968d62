"""Numbers of the documents are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_broadway.adapters.host import MAX_SHUTDOWN
from airflow_broadway.cli import queue as queues
from airflow_broadway.cli import runs as cli_staged
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.formats import layout, live
from airflow_broadway.core.formats import record_batch as recording
from airflow_broadway.core.stages import receiving as intake
from airflow_broadway.plugin import children, reading, standings
from airflow_broadway.plugin.pages import dead_letters
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.rabbitmq import bundle
from airflow_broadway.producers.rabbitmq.broker import checks, standing_queues
from airflow_broadway.producers.rabbitmq.receive import consumer
from airflow_broadway.runs.reading import batches, history, message, reasons
from airflow_broadway.sensors import ack
from airflow_broadway.spark import entries as spark_entries
from airflow_broadway.staging import names, plan_data_files, planner, retention
from airflow_broadway.staging import plan_choice as plans
from airflow_broadway.submit import package as _shipping

DOCS = Path(__file__).parents[2] / "docs"
MIB = 1024 * 1024
PUBSUB = PubSubProducer(subscription="orders")


@pytest.mark.parametrize(
    ("document", "says", "number"),
    [
        ("spark.md", "at most {:,} at a time", spark_entries.CHUNK),
        ("spark.md", "more than {:g} MiB is refused", _shipping.MAX_BYTES / MIB),
        ("cli.md", "{} of them unless `--limit`", cli_staged.NEWEST),
        ("cli.md", "{:,} to a transaction", queues.PORTION),
        ("backfills.md", "{:g} days after it balanced", retention.KEEP / 86_400),
        ("ui.md", "in pages of {}", batches.PAGE),
        ("ui.md", "A process task reports its count every {:g} s", live.LIVE_INTERVAL),
        ("ui.md", "counted up to {:,} batches", batches.MOST_OUTCOMES),
        ("ui.md", "and {:g} MiB of failures", reasons.MOST_BYTES / MIB),
        ("ui.md", "their data and keys: {} of them", message.MOST_HITS),
        ("ui.md", "within {:g} s", message.MOST_SECONDS),
        ("ui.md", "the {} latest runs of the pipeline", message.MOST_RUNS),
        ("ui.md", "a page waits {:g} s at the most", reading.SECONDS),
        ("ui.md", "at most {} pages read concurrently", {8: "eight"}[reading.MOST]),
        ("ui.md", "at most {} at a time", children.MOST),
        ("ui.md", "never ran too, {} on a page", standings.PER_PAGE),
        ("ui.md", "**its last {} runs**", standings.SHOWN),
        ("ui.md", "one of the last {} runs does not", standings.LOOKED),
        ("ui.md", "| {} dead letters or more", history.MANY_DEAD),
        ("ui.md", "{} or more of the last run's", {0.1: "a tenth"}[history.MANY_FAILED]),
        ("ui.md", "has waited for {} or more", {3600.0: "an hour"}[history.OLD_BACKLOG]),
        ("ui.md", "for at most {:g} s each", children.TIMEOUT),
        ("ui.md", "{} on a page", dead_letters.PAGE),
        ("ui.md", "A search takes at most {:g} s", dead_letters.LOOK_SECONDS),
        ("ui.md", "{} for each user", {1: "one"}[children.MOST_OF_USER]),
        ("ui.md", "cut after {} KiB", dead_letters.MOST_SHOWN // 1024),
        ("ui.md", "in digits after {} KiB", dead_letters.MOST_SHOWN // 4096),
        ("concepts.md", "it is {:g} s at most", MAX_SHUTDOWN),
        ("concepts.md", "at most {:,} messages unless", intake._MAX_DEMAND),
        ("concepts.md", "at most {:,} small ones of Pub/Sub", PubSubProducer.max_fetch),
        ("producers.md", "at most {:,} messages at a time", Producer.max_fetch),
        ("operators.md", "but within {:g} seconds", MAX_SHUTDOWN),
        ("operators.md", "(a quarter of the lease, at most {:g})", ack.MAX_POKE_INTERVAL),
        ("operators.md", "Keep that at {:g} or more", ack.MIN_RESCHEDULE_INTERVAL),
        ("rabbitmq.md", "(at most {} messages or", bundle.MAX_MESSAGES),
        ("rabbitmq.md", "messages or {:g} MiB), each bundle", bundle.MAX_BYTES / MIB),
        ("rabbitmq.md", "when it is at least {:g} seconds old", standing_queues._RELIABLE_AGE),
        ("rabbitmq.md", "ask for nothing for {:g} seconds", consumer.DEMAND_TIMEOUT),
        ("rabbitmq.md", "{:g} s per request at most", checks.ANSWER_TIMEOUT),
        ("semantics.md", "| `receive_timeout` | for ever | {:g} s", PUBSUB.receive_timeout),
        ("staging.md", "`version`, now {}", layout.VERSION),
        ("staging.md", "hold up to {:g} KiB of entries", recording.INLINE_BYTES / 1024),
        ("staging.md", "up to {:,} in a file", recording.GATHERED),
        ("staging.md", "memory holds {:g} MiB", plans.KEPT_BYTES / MIB),
        ("staging.md", "Above {} characters it is cut", names.MAX_NAME),
        ("staging.md", "A batch with {:,} rows or more", plan_data_files.OWN_GROUP_ROWS),
        ("staging.md", "a plan of more than {:,} logs a warning", planner.MANY_BATCHES),
        ("staging.md", "removed {:g} days later", retention.KEEP / 86_400),
    ],
)
def test_documented_numbers_match_the_code(document, says, number):
    words = " ".join((DOCS / document).read_text("utf-8").split())
    assert says.format(number) in words
