"""The half that settles, from any process."""
