"""Reads runs from a staging root for the command line, the web pages and the report.

Read-only; needs neither Airflow nor HTML.  A page reads manifests, plans, sums and a bounded number
of outcomes.  Payloads are read only if a user searches for one.
"""
