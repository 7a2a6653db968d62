"""The custody engine: receives, extends and settles messages of a broker that hands out receipts.

An adapter implements ``port.Broker`` and nothing else; ``docs/producers.md`` explains it.
``source`` receives over ``polls``.  ``custodian`` and ``settlement`` settle over ``requests``.
``receipts`` records what a generation holds and reads what others held before; ``letters`` serves
dead letters.
"""
