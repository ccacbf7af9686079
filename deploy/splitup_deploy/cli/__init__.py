"""The ``splitup-deploy`` command: one module per verb."""
