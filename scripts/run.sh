#!/usr/bin/env bash
# Run a command in this checkout, set up first if it is not yet:
#
#   scripts/run.sh [--rabbitmq] [--browser] [--airflow NAME] COMMAND [ARGUMENT...]
#
#   --rabbitmq      the command wants a RabbitMQ to be installed
#   --browser       the command wants Chromium and its driver to be installed
#   --airflow NAME  the command uses Airflow's metadata database; its AIRFLOW_HOME is build/NAME
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

home=
setup=(bash scripts/setup.sh)
while :; do
    case ${1:-} in
        --rabbitmq | --browser) setup+=("$1") ;;
        --airflow) home=$2; shift ;;
        *) break ;;
    esac
    shift
done
"${setup[@]}"
. scripts/env.sh "${home:-airflow}"
if [ -n "$home" ]; then
    python -m scripts.local_airflow
fi
exec "$@"
