"""The protocol as state machines without I/O: events in, commands out."""
