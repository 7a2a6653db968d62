"""Messages, batches, callbacks and custody.  Standard library only, no I/O."""
