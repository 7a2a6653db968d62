"""Delta Lake on Spark reads an archive, appends to it and rewrites its files."""

from __future__ import annotations

import pytest

from tests.unit.runs.archive_steps import World
from tests.unit.spark.session import TABLES, spark_session

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(not TABLES, reason="Delta Lake's jars: scripts/setup.sh --tables"),
]


def test_spark_reads_and_writes_an_archive(tmp_path):
    # Given messages of two executions
    world = World(tmp_path)
    world.live(3, 61)
    world.live(1, run_id="more")
    place = f"{world.store.root}/{world.archive.path}"
    spark = spark_session()

    # When Spark reads them, rewrites their files and appends another one
    [row] = spark.sql(
        f"SELECT count(*) AS n, max(time) AS last FROM delta.`{place}` WHERE date = '2013-01-01'"
    ).collect()
    assert row.n == 3
    spark.sql(f"OPTIMIZE delta.`{place}`")
    spark.sql(
        f"INSERT INTO delta.`{place}` (time, message_id, payload, date, hour) VALUES"
        " (TIMESTAMP '2013-01-01 09:02:00Z', 'own', X'7B226D696E757465223A327D', '2013-01-01', 9)"
    )

    # Then live runs and backfills go on
    world.live(4, run_id="later")
    world.backfill("again")
    assert world.rows("again") == [1, 2, 3, 4]
