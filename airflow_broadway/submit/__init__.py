"""What starts Spark; only ``hook`` needs Airflow.

===============  ==================================================================
``plans``        what there is to do: plans, and their batches without an outcome
``submission``   everything that spark-submit is given
``package``      the code: one zip file
``environment``  the program, its Java, its Python, its settings
``hook``         the Spark provider's hook, with what we need more
===============  ==================================================================
"""
