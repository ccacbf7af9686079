"""A whole network on one machine: a real chain and object store, one process per party."""
