"""The ``splitup-oracle`` command."""
