"""Whole networks of real processes; those that share one are together in one process."""
