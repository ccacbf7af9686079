"""The ``splitup`` command."""
