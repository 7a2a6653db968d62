"""What starts Spark: the code that is shipped, the environment, the program."""
