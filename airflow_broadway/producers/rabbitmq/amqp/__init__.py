"""Speaking AMQP: a connection and its thread, frames, confirms."""
