"""The custody engine: receives, extends and settles messages of a broker that hands out receipts.

An adapter implements ``port.Broker`` and nothing else; ``docs/producers.md`` explains it.
``source`` receives by ``polls``.  ``custodian`` and ``settlement`` settle by ``requests``.
``receipts`` records the receipts of each generation; ``letters`` lists, requeues and deletes dead
letters.
"""
