"""A trivial Spark application."""

from pyspark.sql import SparkSession

if __name__ == "__main__":
    session = SparkSession.builder.getOrCreate()
    session.range(1).count()
    session.stop()
