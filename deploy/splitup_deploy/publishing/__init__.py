"""Putting a compiled model on the network."""
