"""The pandas that the extra ``spark`` brings is one that PySpark takes without a warning."""

from __future__ import annotations

import warnings

from pyspark.sql.pandas.utils import require_minimum_pandas_version


def test_pyspark_has_no_warning_for_the_log_of_each_application() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_minimum_pandas_version()
