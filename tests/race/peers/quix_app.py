"""Quix Streams' ``LocalFileSink`` in its Parquet format: files are written, and then offsets
committed, at each checkpoint of 10,000 messages or 1 second; ``session.timeout.ms=6000``."""

import os

from quixstreams import Application
from quixstreams.sinks.community.file.local import LocalFileSink

os.chdir(os.environ["RACE_FOLDER"])  # its folders have no hyphens
app = Application(
    broker_address=os.environ["RACE_URL"],
    consumer_group=os.environ["RACE_QUEUE"],
    auto_offset_reset="earliest",
    commit_interval=1,
    commit_every=10_000,
    consumer_extra_config={"session.timeout.ms": 6000},
)
topic = app.topic(os.environ["RACE_QUEUE"], value_deserializer="json")
app.dataframe(topic).sink(LocalFileSink(directory=".", format="parquet"))
app.run()
