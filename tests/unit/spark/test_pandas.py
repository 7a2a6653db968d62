"""PySpark accepts the pandas of the extra ``spark`` without a warning."""

from __future__ import annotations

import warnings

from pyspark.sql.pandas.utils import require_minimum_pandas_version


def test_pyspark_does_not_warn_about_application_logs():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_minimum_pandas_version()
