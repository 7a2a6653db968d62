#!/usr/bin/env bash
# Set up this checkout: the environment in .venv and a Java for Spark; with --rabbitmq or --kafka, that
# broker too; with --s3a, Hadoop's S3A; with --tables, the jars of tables and their catalog; with --browser, Chromium and
# its driver; with --cluster, Celery and PostgreSQL's client; with --race, its peers; with --quick-spark, what lets many Sparks start in less time.
#
# Needs Python alone.  Each step leaves a stamp, so that a second call does nothing, in a fraction of a
# second.  Only root on Debian or Ubuntu has system packages installed for it; all others are told the
# one command to run.  Set PYTHON to choose an interpreter, JAVA_HOME to choose a Java.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

say() { printf '%s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# ------------------------------------------------------------------------------- system packages
root_on_debian() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_ready=
apt_install() {
    if [ -z "$apt_ready" ]; then
        apt-get update -qq >&2
        apt_ready=1
    fi
    # A package that brings a service must not start it: this file makes dpkg leave it alone.  It goes
    # however this ends; one that a kill -9 has left is known by its comment, and goes the next time.
    local policy=/usr/sbin/policy-rc.d mark='# by the set-up of airflow-broadway'
    if [ ! -e "$policy" ] || grep -qxF "$mark" "$policy"; then
        (
            trap 'rm -f "$policy"' EXIT
            trap 'exit 129' HUP
            trap 'exit 130' INT
            trap 'exit 143' TERM
            printf '#!/bin/sh\n%s\nexit 101\n' "$mark" >"$policy"
            chmod +x "$policy"
            apt_get_install "$@"
        )
    else
        apt_get_install "$@"
    fi
}

apt_get_install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null >&2
}

# ---------------------------------------------------------------------------------------- Python
suitable_python() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null
}

find_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then
        suitable_python "$PYTHON" || die "PYTHON=$PYTHON is not a Python from 3.11 to 3.14."
        printf '%s\n' "$PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11; do
        if suitable_python "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    die "Python 3.11 or newer is needed, and neither python3 nor python3.11 to python3.13 on PATH is one."
}

make_venv() {
    local python version
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ -x .venv/bin/python ] && [ "$(venv_version)" = "$version" ]; then
        # uv makes environments without pip, and may be gone since.
        command -v uv >/dev/null || .venv/bin/python -m pip --version >/dev/null 2>&1 \
            || .venv/bin/python -m ensurepip >/dev/null
        return
    fi
    say "Making .venv with Python $version."
    rm -rf .venv
    if command -v uv >/dev/null; then
        uv venv --quiet --no-project --python "$python" .venv
        return
    fi
    # Debian's Python comes without what a virtual environment needs.
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        root_on_debian || die "This Python cannot make a virtual environment.  On Debian or Ubuntu:" \
            "sudo apt-get install python$version-venv"
        apt_install "python$version-venv"
    fi
    "$python" -m venv .venv
}

venv_version() {
    .venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# The arguments after `pip install`.  Everything comes with a hash, what builds packages too: it is
# installed first, and builds are not isolated, since an isolated one would fetch its tools unchecked.
pip_install() {
    if command -v uv >/dev/null; then
        uv pip install --quiet --python .venv/bin/python --no-build-isolation "$@"
    else
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
            --no-build-isolation "$@"
    fi
}

setup_python() {
    local locked project
    # The path is in it, because a virtual environment cannot be moved.
    locked="$(cat requirements-build.lock requirements.lock | cksum) ${PYTHON:-} $root"
    project="$(cksum <pyproject.toml) $locked"
    if [ "$(cat .venv/.project 2>/dev/null)" = "$project" ] && [ -n "$(venv_version)" ]; then
        return
    fi
    if [ "$(cat .venv/.locked 2>/dev/null)" != "$locked" ] || [ -z "$(venv_version)" ]; then
        make_venv
        say "Installing $(grep -c '^[a-z]' requirements.lock) packages into .venv; the first time this takes some minutes."
        pip_install --require-hashes -r requirements-build.lock
        pip_install --require-hashes -r requirements.lock
        # Not every installer compiles, and where PYTHONDONTWRITEBYTECODE is set none does: then each
        # of Airflow's many processes would compile all that it imports.
        .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null || true
        printf '%s\n' "$locked" >.venv/.locked
    fi
    pip_install --no-deps -e .
    printf '%s\n' "$project" >.venv/.project
}

# Installs without dependencies, which requirements.lock has already, so that nothing else changes.
setup_cluster() {
    local made
    made="$(cksum <requirements-cluster.lock) $(cat .venv/.locked)"
    [ "$(cat .venv/.cluster 2>/dev/null)" != "$made" ] || return 0
    pip_install --no-deps --require-hashes -r requirements-cluster.lock
    printf '%s\n' "$made" >.venv/.cluster
}

# An environment of their own: their dependencies are not this project's.
setup_race() {
    local made venv=build/race/.venv
    made="$(cksum <tests/race/requirements.txt) $(venv_version) $root"
    [ "$(cat "$venv/.made" 2>/dev/null)" != "$made" ] || return 0
    say "Installing the peers of the race into $venv; this takes some minutes."
    mkdir -p build/setup
    rm -rf "$venv"
    if .venv/bin/python -m venv "$venv" >build/setup/race.log 2>&1 && "$venv/bin/python" -m pip install --quiet \
        --disable-pip-version-check --no-input -r tests/race/requirements.txt >>build/setup/race.log 2>&1; then
        printf '%s\n' "$made" >"$venv/.made"
    else
        rm -rf "$venv"
        say "The peers of the race could not be installed (build/setup/race.log): they are left out."
    fi
}

# ------------------------------------------------------------------------------------------ Java
# Spark 4 runs on Java 17 or newer and asks for a module that some slimmed-down Javas lack.
suitable_java() {
    local modules major
    modules=$("$1/bin/java" --list-modules 2>/dev/null) || return 1
    major=$(printf '%s\n' "$modules" | sed -n 's/^java\.base@\([0-9]*\).*/\1/p')
    case $'\n'$modules in *$'\n'jdk.incubator.vector@*) ;; *) return 1 ;; esac
    [ "${major:-0}" -ge 17 ]
}

java_candidates() {
    local home
    [ -z "${JAVA_HOME:-}" ] || printf '%s\n' "$JAVA_HOME"
    if command -v java >/dev/null; then
        java -XshowSettings:properties -version 2>&1 | sed -n 's/^ *java\.home = //p' || true
    fi
    if [ -x /usr/libexec/java_home ]; then
        /usr/libexec/java_home -v 17+ 2>/dev/null || true
    fi
    for home in /usr/lib/jvm/*17* /usr/lib/jvm/*21* /usr/lib/jvm/* \
        {/opt/homebrew,/usr/local}/opt/openjdk{@17,@21,}/libexec/openjdk.jdk/Contents/Home \
        /Library/Java/JavaVirtualMachines/*/Contents/Home; do
        [ ! -x "$home/bin/java" ] || printf '%s\n' "$home"
    done
}

find_java() {
    local home
    while IFS= read -r home; do
        if suitable_java "$home"; then
            printf '%s\n' "$home"
            return
        fi
    done < <(java_candidates)
    return 1
}

setup_java() {
    local stamp=build/setup/java asked=${JAVA_HOME:-} found
    # Two lines: the JAVA_HOME that was set, and the one that was chosen.
    if [ -r "$stamp" ] && [ "$(sed -n 1p "$stamp")" = "$asked" ] \
        && [ -x "$(sed -n 2p "$stamp")/bin/java" ]; then
        return
    fi
    if ! found=$(find_java) && root_on_debian; then
        say "Installing a Java runtime for Spark."
        apt_install openjdk-17-jre-headless || apt_install default-jre-headless || true
        found=$(find_java) || found=
    fi
    if [ -z "$found" ]; then
        if [ "$(uname)" = Darwin ]; then
            die "Spark needs Java 17 or newer with the module jdk.incubator.vector: brew install openjdk@21"
        fi
        die "Spark needs Java 17 or newer with the module jdk.incubator.vector:" \
            "sudo apt-get install openjdk-17-jre-headless (or set JAVA_HOME to one)"
    fi
    [ -z "$asked" ] || [ "$asked" = "$found" ] \
        || say "JAVA_HOME=$asked cannot run Spark 4 (Java 17 or newer, with jdk.incubator.vector); using $found."
    mkdir -p build/setup
    printf '%s\n%s\n' "$asked" "$found" >"$stamp"
}

# An archive of Spark's classes as Java has them in memory, which it maps instead of reading them anew:
# Spark starts with 60 % of the processor time.  Java checks that it fits, and does without if not.
setup_quick_spark() {
    local stamp=build/setup/spark-classes archive=build/setup/spark.jsa new=build/setup/spark.$$.jsa made java
    java=$(sed -n 2p build/setup/java)
    made="$java $("$java/bin/java" -Xinternalversion) $(grep '^pyspark==' requirements.lock) $root"
    [ "$(cat "$stamp" 2>/dev/null)" != "$made" ] || return 0
    say "Making an archive of Spark's classes, so that the many Sparks of this target start quickly."
    rm -f "$stamp" "$archive"
    # Under a name of its own, for two of these may be at it at once.
    env -u SPARK_HOME JAVA_HOME="$java" PATH="$root/.venv/bin:$PATH" \
        SPARK_SUBMIT_OPTS="-XX:ArchiveClassesAtExit=$new -XX:TieredStopAtLevel=1 -Xlog:disable" \
        .venv/bin/spark-submit scripts/spark_classes.py >build/setup/spark-classes.log 2>&1 || true
    mv -f "$new" "$archive" 2>/dev/null \
        || say "It could not be made (build/setup/spark-classes.log): they start as always."
    printf '%s\n' "$made" >"$stamp"
}

# -------------------------------------------------------------------------------------- RabbitMQ
have_rabbitmq() {
    local place
    [ -z "${AIRFLOW_BROADWAY_RABBITMQ_URL:-}" ] || return 0
    for place in "$(command -v rabbitmq-server)" /usr/sbin/rabbitmq-server \
        {/opt/homebrew,/usr/local}/sbin/rabbitmq-server; do
        [ ! -x "$place" ] || return 0
    done
    return 1
}

setup_rabbitmq() {
    have_rabbitmq && return
    if root_on_debian; then
        say "Installing RabbitMQ for the tests; they start it themselves."
        apt_install rabbitmq-server || true
        have_rabbitmq && return
    fi
    case ${CI:-}${AIRFLOW_BROADWAY_CI:-} in
        *true* | *1*) die "RabbitMQ is not installed and could not be: in CI its tests must run." ;;
    esac
    say "No RabbitMQ: its tests are skipped.  To run them: brew install rabbitmq (macOS)," \
        "sudo apt-get install rabbitmq-server (Debian, Ubuntu), or" \
        "docker compose -f docker/compose.yaml up -d and" \
        "export AIRFLOW_BROADWAY_RABBITMQ_URL=amqp://guest:guest@127.0.0.1:5672/"
}

# -------------------------------------------------------------------------------- Kafka, S3A, tables
# Jars of Maven Central, which only Maven fetches: each with its hash in jars.sha256.
sha256() {
    if command -v sha256sum >/dev/null; then sha256sum "$@"; else shasum -a 256 "$@"; fi
}

# setup_jars FOLDER TITLE WITHOUT: what scripts/FOLDER names, into build/FOLDER.
setup_jars() {
    local pins=scripts/$1/jars.sha256 jars=build/$1 new=build/$1.$$ made
    made=$(cat "scripts/$1/pom.xml" "$pins" | cksum)
    [ "$(cat "$jars/.whole" 2>/dev/null)" != "$made" ] || return 0
    if ! command -v mvn >/dev/null; then
        say "No mvn: $3.  To run all: apt-get install maven."
        return
    fi
    say "Resolving $2 with Maven for the tests; they start it themselves."
    mkdir -p build/setup
    if JAVA_HOME=$(sed -n 2p build/setup/java) mvn -q -B -f "scripts/$1/pom.xml" \
        dependency:copy-dependencies -DoutputDirectory="$PWD/$new" >"build/setup/$1.log" 2>&1 </dev/null; then
        (cd "$new" && sha256 *.jar) | cmp -s - "$pins" \
            || die "The jars of $2 in $new are not those that $pins pins: see which with sha256sum."
        printf '%s\n' "$made" >"$new/.whole"
        rm -rf "$jars"
        mv "$new" "$jars"
    else
        rm -rf "$new"
        say "Maven could not resolve $2 (build/setup/$1.log): $3."
    fi
}

# --------------------------------------------------------------------------------------- Chromium
# The tests find them on PATH, too: tests/browser/chromium.py.
have_browser() {
    command -v chromedriver >/dev/null \
        && { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null
}

setup_browser() {
    have_browser && return
    if root_on_debian; then
        say "Installing Chromium and its driver for the tests in a browser."
        apt_install chromium chromium-driver || true
        have_browser && return
    fi
    # Whoever asks for these tests asks for a browser: nothing is left of them without one.
    die "The tests in a browser need Chromium and its driver on PATH:" \
        "sudo apt-get install chromium chromium-driver (Debian, Ubuntu)," \
        "brew install --cask chromium chromedriver (macOS)"
}

# ------------------------------------------------------------------------------------------------
rabbitmq='' kafka='' s3a='' tables='' browser='' cluster='' race='' quick_spark=''
for argument in "$@"; do
    case $argument in
        --rabbitmq) rabbitmq=1 ;;
        --kafka) kafka=1 ;;
        --s3a) s3a=1 ;;
        --tables) tables=1 ;;
        --browser) browser=1 ;;
        --cluster) cluster=1 ;;
        --race) race=1 ;;
        --quick-spark) quick_spark=1 ;;
        *) die "setup.sh knows --rabbitmq, --kafka, --s3a, --tables, --browser, --cluster, --race and --quick-spark, not $argument." ;;
    esac
done
setup_python
setup_java
[ -z "$rabbitmq" ] || setup_rabbitmq
[ -z "$kafka" ] || setup_jars kafka "Apache Kafka" "tests of Kafka run on librdkafka's mock cluster alone"
[ -z "$s3a" ] || setup_jars s3a "Hadoop's S3A (700 MB)" "its test is skipped"
[ -z "$tables" ] || setup_jars tables "Delta Lake and PostgreSQL's driver for Spark" "their tests on Spark are left out"
[ -z "$tables" ] || setup_jars iceberg "Apache Iceberg's REST catalog" "its tests are left out"
[ -z "$browser" ] || setup_browser
[ -z "$cluster" ] || setup_cluster
[ -z "$race" ] || setup_jars spark-kafka "Spark's connector for Kafka" "Structured Streaming is left out"
[ -z "$race" ] || setup_race
[ -z "$quick_spark" ] || setup_quick_spark
