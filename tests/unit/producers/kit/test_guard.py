from __future__ import annotations

import pytest

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.kit.guard import MessageGuard


def test_message_error_is_counted_with_reason():
    guard, done = MessageGuard(), []

    for key in ("a", "b", "c", "d"):
        with guard.isolate(key):
            if key == "b":
                raise ProducerError("its routing key cannot be published again")
            if key != "a":
                raise UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed")
            done.append(key)

    assert done == ["a"]
    assert list(guard.refused) == ["b", "c", "d"]
    first, second = guard.errors()
    assert first.startswith("2 messages could not be settled, the first of them 'c': UnicodeEnc")
    assert second == ("message 'b' could not be settled: its routing key cannot be published again")


@pytest.mark.parametrize("error", [ProducerUnavailable("gone"), KeyboardInterrupt(), SystemExit(1)])
def test_outage_and_kill_concern_all_messages(error):
    guard = MessageGuard()

    with pytest.raises(type(error)), guard.isolate("a"):
        raise error

    assert not guard.refused
