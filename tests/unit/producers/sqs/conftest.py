"""The halves of one generation for each test."""

import pytest

from tests.unit.producers.sqs.kit import halves


@pytest.fixture
def run(request, tmp_path):
    """A generation over a fake SQS; ``@options(...)`` gives its options."""
    options = dict(getattr(request, "param", {}))
    staging = tmp_path.as_uri() if options.pop("staged", False) else None
    with halves(staging, **options) as run:
        yield run
