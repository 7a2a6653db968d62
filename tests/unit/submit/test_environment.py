"""A worker's Spark, Java and settings, checked before a JVM starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_broadway.submit.environment import (
    SparkMissing,
    check_java,
    default_conf,
    file_settings,
    find_spark,
)


def program(path: Path, text: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def java(home: Path, version: str, *modules: str) -> dict[str, str]:
    lines = "\n".join([f"java.base@{version}", *(f"{name}@{version}" for name in modules)])
    program(home / "bin" / "java", f"cat <<END\n{lines}\nEND")
    return {"JAVA_HOME": str(home)}


def test_spark_home_wins(tmp_path):
    binary = program(tmp_path / "bin" / "spark-submit")
    spark = find_spark("spark-submit", {"SPARK_HOME": str(tmp_path), "PATH": ""})
    assert (spark.binary, spark.bundled, spark.env) == (str(binary), False, {})


def test_program_on_path_is_used_unchanged(tmp_path):
    binary = program(tmp_path / "spark3-submit")
    spark = find_spark("spark3-submit", {"PATH": str(tmp_path)})
    assert (spark.binary, spark.env) == (str(binary), {})


def test_java_17_is_accepted(tmp_path):
    check_java(java(tmp_path, "17.0.15", "jdk.incubator.vector"))
    check_java(java(tmp_path, "21", "jdk.incubator.vector"))


def test_missing_java_is_an_error(tmp_path):
    with pytest.raises(SparkMissing, match=r"no java program was found \(there is no JAVA_HOME\)"):
        check_java({"PATH": str(tmp_path)})


def test_wrong_java_home_is_named_with_the_missing_program(tmp_path):
    home = tmp_path / "jdk"
    (home / "bin").mkdir(parents=True)
    expected = rf"JAVA_HOME is '{home}', but there is no program {home}/bin/java: set JAVA_HOME to"
    with pytest.raises(SparkMissing, match=expected):
        check_java({"JAVA_HOME": str(home)})
    (home / "bin" / "java").write_text("no program")
    with pytest.raises(SparkMissing, match=expected):
        check_java({"JAVA_HOME": str(home)})


def test_old_java_is_an_error(tmp_path):
    with pytest.raises(SparkMissing, match=r"is too old for Spark \(16.0.2; JAVA_HOME is"):
        check_java(java(tmp_path, "16.0.2", "jdk.incubator.vector"))
    program(tmp_path / "bin" / "java", "echo 'Unrecognized option: --list-modules' >&2; exit 1")
    with pytest.raises(SparkMissing, match=r"is too old for Spark .Unrecognized option"):
        check_java({"JAVA_HOME": str(tmp_path)})


def test_java_without_the_vector_module_is_an_error(tmp_path):
    with pytest.raises(SparkMissing, match=r"lacks the module jdk.incubator.vector, without which"):
        check_java(java(tmp_path, "17.0.15"))


EXIT = "-XX:+ExitOnOutOfMemoryError"
OPTIONS = "spark.driver.defaultJavaOptions"


@pytest.mark.parametrize("master", ["local[2]", "yarn", "k8s://https://host"])
def test_java_exits_on_out_of_memory_before_other_options(master):
    def options(conf):
        return default_conf(master, conf, {})[OPTIONS]

    assert options({}) == EXIT
    assert options({OPTIONS: "-Da=1"}) == f"{EXIT} -Da=1"
    assert options({OPTIONS: f"-Da=1 {EXIT}"}) == f"-Da=1 {EXIT}"
    assert options({OPTIONS: "-XX:-ExitOnOutOfMemoryError"}) == "-XX:-ExitOnOutOfMemoryError"


@pytest.mark.parametrize(
    "place", ["argument", "SPARK_CONF_DIR", "SPARK_HOME", "next to the program"]
)
def test_default_java_options_of_a_settings_file_stay(tmp_path, place):
    file = tmp_path / "conf" / "spark-defaults.conf"
    file.parent.mkdir()
    file.write_text(f"{OPTIONS} = -Da=1 \\\n  -Db=2\nspark.log.level\tINFO\n")
    folders = {"SPARK_CONF_DIR": str(file.parent), "SPARK_HOME": str(tmp_path)}
    env = {name: folder for name, folder in folders.items() if name == place}
    binary = str(tmp_path / "bin" / "spark-submit") if place == "next to the program" else ""
    settings = file_settings(str(file) if place == "argument" else None, env, binary)
    conf = default_conf("local[2]", {}, settings)
    assert conf[OPTIONS] == f"{EXIT} -Da=1 -Db=2"
    assert "spark.log.level" not in conf


@pytest.mark.parametrize("master", ["yarn", "spark://host:7077", "k8s://https://host"])
def test_cluster_gets_no_light_settings(master):
    once = {"spark.yarn.maxAppAttempts": "1"} if master == "yarn" else {}
    assert default_conf(master, {}, {}) == {"spark.scheduler.mode": "FAIR", OPTIONS: EXIT, **once}


def test_local_master_gets_the_settings_of_the_guide():
    assert default_conf("local[*]", {}, {}) == {
        "spark.scheduler.mode": "FAIR",
        OPTIONS: EXIT,
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.shuffle.partitions": "8",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "WARN",
    }
