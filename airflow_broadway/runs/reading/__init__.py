"""Reads runs from a staging root, for the command line, the pages and the report alike.

Needs neither Airflow nor HTML, and changes no file.  A page reads manifests, plans and sums, and of
outcomes only as many as its numbers allow; payloads only if a user searches for one.
"""
