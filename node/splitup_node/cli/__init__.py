"""The ``splitup-node`` command."""
