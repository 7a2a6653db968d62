"""Google Cloud Pub/Sub: messages are held by ack ids that this package writes down.

``options`` are declared, ``producer`` opens the halves, which stand on ``kit.receipts``.
Receiving: ``source``, ``pulls``, ``reading`` (from an answer to messages), ``earlier`` (what was
handed out before).  Settling: ``custodian``, ``settlement``, ``batch_requests``, ``dead_letters``.
``client``, ``credentials``, ``errors`` and ``limits`` are the way to Google; ``inspect`` and
``monitoring`` look at a subscription.  ``docs/pubsub.md`` is the guide.
"""

from __future__ import annotations

from airflow_broadway.producers.pubsub.producer import PubSubProducer

__all__ = ["PubSubProducer"]
