"""The custodian: settles leases, from any process."""
