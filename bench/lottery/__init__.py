"""Simulations of how nodes are chosen: ``python -m bench selection``."""
