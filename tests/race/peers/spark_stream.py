"""Spark Structured Streaming on ``local[2]``: the Kafka source, the Parquet file sink with a
checkpoint, the default trigger; files count once ``_spark_metadata`` lists them, as for Spark."""

import os
from glob import glob

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, from_json

spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.jars", ",".join(glob(os.environ["RACE_JARS"])))
    .config("spark.ui.enabled", False)
    .getOrCreate()
)
rows = (
    spark.readStream.format("kafka")
    .option("kafka.bootstrap.servers", os.environ["RACE_URL"])
    .option("subscribe", os.environ["RACE_QUEUE"])
    .option("startingOffsets", "earliest")
    .load()
    .select(from_json(col("value").cast("string"), "n bigint, sent double, text string").alias("v"))
    .select("v.*")
)
query = (
    rows.writeStream.format("parquet")
    .option("path", os.environ["RACE_FOLDER"])
    .option("checkpointLocation", os.environ["RACE_STATE"])
    .start()
)
query.awaitTermination()
