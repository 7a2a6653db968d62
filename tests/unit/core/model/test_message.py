from __future__ import annotations

import pickle
from unittest.mock import Mock

from airflow_broadway.core.model.message import Message, Status


def test_unencodable_reason_is_escaped():
    assert Status("failed", "Bob \ud83d").text == "Bob \\ud83d"
    assert Status("error", ValueError("\udcff")).text == "ValueError: \\udcff"


def test_metadata_is_loaded_by_its_first_reader():
    load = Mock(return_value={"key": 1})
    message = Message(b"", metadata=load)
    changed = message.put_data(b"x")
    load.assert_not_called()
    assert [message.metadata, message.metadata] == [{"key": 1}] * 2
    load.assert_called_once_with()
    assert pickle.loads(pickle.dumps(changed)).metadata == {"key": 1}
    assert changed == Message(b"x", metadata={"key": 1})
