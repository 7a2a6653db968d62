"""Airflow hooks: connections to the brokers."""
