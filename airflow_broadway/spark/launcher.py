"""The script that spark-submit starts; the operator ships a copy of it with the code.

Compatible with any Python 3, so that an old one gets a clear error.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - that is the point
    sys.exit(
        "airflow-broadway needs Python 3.10 or newer in the Spark driver; this is Python"
        f" {sys.version.split()[0]} at {sys.executable}.  Set PYSPARK_DRIVER_PYTHON and"
        " PYSPARK_PYTHON (env_vars of the operator) to a newer one."
    )

if __name__ == "__main__":
    try:
        from airflow_broadway.spark.job import main
    except ImportError as error:
        sys.exit(
            f"airflow-broadway cannot be imported in the Spark driver ({error}): its zip file is"
            f" missing from py_files; sys.path is {sys.path}"
        )
    sys.exit(main(sys.argv[1:]))
