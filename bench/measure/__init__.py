"""Programs that measure one thing each: ``python -m bench.measure.NAME``."""
