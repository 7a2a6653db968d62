"""A Pub/Sub of the tests' own: its rules in memory, on any clock, behind the client's own gRPC.

What the emulator does not show is here: permissions, quotas and lost answers on demand, limits,
subscriptions that cannot be pulled from, acknowledgements too late, hours of a manual clock.
"""
