"""A subscription of the stub for each test."""

import pytest

from tests.unit.producers.pubsub.kit import open_subscription


@pytest.fixture
def sub(request, tmp_path):
    """A subscription with a staging folder; ``@settings(...)`` gives its settings."""
    with open_subscription(tmp_path, **getattr(request, "param", {})) as subscription:
        yield subscription
