# To be sourced by bash after scripts/setup.sh, in the checkout: the environment of every target.
#
# Sets PATH, JAVA_HOME, AIRFLOW_HOME and Airflow's settings and connections, the latter as
# scripts/airflow_env.py has them.  $1 names the AIRFLOW_HOME in build/; "airflow" if not given.

PATH="$PWD/.venv/bin:$PATH"
JAVA_HOME=$(sed -n 2p build/setup/java)
export PATH JAVA_HOME
unset VIRTUAL_ENV PYTHONHOME SPARK_HOME
# A target starts hundreds of Pythons: without bytecode each would compile this checkout anew.
unset PYTHONDONTWRITEBYTECODE
if [ "${CI:-}" = true ]; then
    export AIRFLOW_BROADWAY_CI=1
fi
# Settings of another Airflow must not show through.
for name in $(compgen -e | grep -E '^_?AIRFLOW_(_|CONN_|VAR_|CONFIG$)' || true); do
    unset "$name"
done
eval "$(.venv/bin/python -m scripts.airflow_env "${1:-airflow}")"
