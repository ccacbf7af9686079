"""Showing a cut model to a person."""
