"""Simulations of the market: whether lies pay, and who gets the work."""
