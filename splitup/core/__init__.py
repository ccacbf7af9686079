"""Errors, bounds, canonical encoding and tensors: what every other package builds on."""
