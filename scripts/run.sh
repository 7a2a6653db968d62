#!/usr/bin/env bash
# Run a command in this checkout, set up first if it is not yet:
#
#   scripts/run.sh [--rabbitmq] [--kafka] [--s3a] [--tables] [--browser] [--cluster] [--race] [--quick-spark] [--in-memory] [--airflow NAME] \
#       COMMAND [ARGUMENT...]
#
#   --rabbitmq      the command wants a RabbitMQ to be installed
#   --kafka         the command starts an Apache Kafka where Maven can resolve one
#   --s3a           the command starts Spark with Hadoop's S3A where Maven can resolve it
#   --tables        the command writes tables from Spark where Maven can resolve their jars
#   --browser       the command wants Chromium and its driver to be installed
#   --cluster       the command wants Airflow's Celery executor and PostgreSQL's client
#   --race          the command runs the peers of the race
#   --quick-spark   the command starts Spark many times, which may have taken a minute to prepare
#   --in-memory     the command syncs many temporary files: they go to memory, where that has room
#   --airflow NAME  the command uses Airflow's metadata database; its AIRFLOW_HOME is build/NAME
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

home='' quick_spark='' in_memory=''
setup=(bash scripts/setup.sh)
while :; do
    case ${1:-} in
        --rabbitmq | --kafka | --s3a | --tables | --browser | --cluster | --race) setup+=("$1") ;;
        --quick-spark) setup+=("$1"); quick_spark=$PWD/build/setup/spark.jsa ;;
        --in-memory) in_memory=/dev/shm ;;
        --airflow) home=$2; shift ;;
        *) break ;;
    esac
    shift
done
"${setup[@]}"
. scripts/env.sh "${home:-airflow}"
if [ -r "$quick_spark" ]; then
    export SPARK_SUBMIT_OPTS="-XX:SharedArchiveFile=$quick_spark -Xlog:disable ${SPARK_SUBMIT_OPTS:-}"
fi
# In a container it often has 64 MB; the tests need some 600.
if [ -w "$in_memory" ] && [ "$(df -Pm "$in_memory" | awk 'END { print $4 }')" -ge 4096 ]; then
    export TMPDIR=$in_memory
fi
if [ -n "$home" ]; then
    python -m scripts.local_airflow
fi
exec "$@"
