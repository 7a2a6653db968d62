"""Broadway's pages in Airflow's UI: what became of every message, and what can be done about it.

Airflow loads ``broadway_plugin`` in each of its processes, so it is light; the rest is loaded by
the API server alone.  Facts come from ``runs.reading``; nothing here keeps state.
"""
