from __future__ import annotations

import pytest

pytest.register_assert_rewrite("airflow_broadway.testing.contract")
