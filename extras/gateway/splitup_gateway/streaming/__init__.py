"""Answers as they are told: whoever comes back reads on, also from the next server."""
