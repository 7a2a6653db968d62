"""What a message passes through in one process, stage by stage."""
