"""A small Spark application that loads the classes that pipelines use.

``setup.sh --quick-spark`` makes a class data archive of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from typing import Any


def main() -> None:
    """Writes and reads rows, with and without a Python worker."""
    from pyspark.sql import SparkSession, functions

    spark = SparkSession.builder.master("local[2]").getOrCreate()

    def same(batches: Iterable[Any]) -> Iterator[Any]:
        yield from batches

    with tempfile.TemporaryDirectory() as folder:
        rows = spark.createDataFrame([(1, "a", b"a"), (2, "b", b"b")], "n INT, s STRING, b BINARY")
        for written in (rows, rows.mapInArrow(same, rows.schema)):
            written.withColumn("again", functions.upper("s")).write.mode("append").parquet(folder)
        read = spark.read.parquet(folder)
        read.groupBy("s").agg(functions.sum("n")).orderBy("s").collect()
        read.rdd.mapPartitions(lambda part: [len(list(part))]).collect()
    spark.stop()


if __name__ == "__main__":
    main()
