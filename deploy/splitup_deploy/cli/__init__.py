"""The ``splitup-deploy`` command."""
