"""The ground that the Spark tests stand on: a JVM, Python workers, and Arrow between them."""

from __future__ import annotations


def test_spark_groups_and_counts(spark) -> None:
    rows = spark.range(10).selectExpr("id % 2 AS parity").groupBy("parity").count()
    assert sorted(tuple(row) for row in rows.collect()) == [(0, 5), (1, 5)]


def test_spark_runs_python_in_its_workers(spark) -> None:
    def double(batches):
        for batch in batches:
            batch["id"] = batch["id"] * 2
            yield batch

    doubled = spark.range(5).mapInPandas(double, "id long")
    assert sorted(row.id for row in doubled.collect()) == [0, 2, 4, 6, 8]
