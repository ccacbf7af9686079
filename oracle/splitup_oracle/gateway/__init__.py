"""The storage gateway: the only holder of the object store's secret."""
