"""What brokers need whose messages are held and settled by receipts: SQS and Pub/Sub.

``receipts`` and ``failures`` are kept in staging.  Receiving: ``source`` and ``polls`` (several
receives in flight).  Settling: ``custodian``, ``settlement`` (from verdicts to requests) and
``batch_requests`` (of many entries, several at a time).
"""
