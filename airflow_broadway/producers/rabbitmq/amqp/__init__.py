"""The AMQP client: a connection and its thread, frames, publisher confirms."""
