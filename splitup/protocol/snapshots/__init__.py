"""Which nodes are alive, and how members agree on it."""
