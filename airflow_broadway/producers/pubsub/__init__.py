"""Google Cloud Pub/Sub as a broker of the custody engine: leases are ack deadlines.

``adapter`` implements the port, with checks and depth.  ``dead_letters`` defines the format of dead
letters and lists them.  ``client``, ``errors`` and ``limits`` wrap Google's client.
``docs/pubsub.md`` is the guide.
"""

from __future__ import annotations

from airflow_broadway.producers.pubsub.options import PubSubProducer

__all__ = ["PubSubProducer"]
