"""Errors, bounds, canonical encoding and tensors, used by every other package."""
