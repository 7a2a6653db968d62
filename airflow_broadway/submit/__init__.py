"""Submission of Spark applications; only ``hook`` needs Airflow.

===============  ==================================================================
``submission``   all inputs of spark-submit
``package``      the code, as one zip file
``environment``  the program, its Java, its Python, its settings
``hook``         an extended hook of the Spark provider
===============  ==================================================================
"""
