"""A file of rows that is durable, and visible whole, when ``write`` returns."""

import os
import uuid

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema([("n", pa.int64()), ("sent", pa.float64()), ("text", pa.string())])
FOLDER = os.environ["RACE_FOLDER"]


def write(rows):
    path = f"{FOLDER}/{uuid.uuid4().hex}.parquet"
    with open(f"{path}.tmp", "wb") as file:
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.tmp", path)
    folder = os.open(FOLDER, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
