"""What the pages in Airflow's UI show: facts about runs, from a staging root.  No Airflow, no HTML.

Built on ``runs.inspect`` and ``runs.account``, as the command line is.  A page reads manifests,
plans and sums, and of outcomes only as many as its numbers allow; the data of messages it never
reads, unless somebody looks for one.
"""
