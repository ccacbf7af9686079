"""Simulations of the market's economics: ``python -m bench.economics.report``."""
