"""A whole network on one machine: real chain, real object store, every party its own process."""
