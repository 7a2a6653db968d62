"""A small Spark application that uses what a pipeline's does: its classes become the archive that
``setup.sh --quick-spark`` makes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from typing import Any


def main() -> None:
    """Writes rows, read them, have Python see them, in both ways."""
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
