"""The formats of a run's files, which tasks and the Spark driver read and write."""
