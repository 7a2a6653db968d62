"""Broadway's pages in Airflow's UI: the outcome of every message, and actions on dead letters.

Airflow imports ``broadway_plugin`` in each of its processes, so it is light; only the API server
imports the rest.  Data come from ``runs.reading``; the pages are stateless.
"""
