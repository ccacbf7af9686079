"""Which tasks a node takes, loads, and tests itself on."""
