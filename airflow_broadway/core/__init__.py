"""The model: messages, batches, callbacks, custody.  Standard library only, no I/O."""
