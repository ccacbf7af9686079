"""Models for small devices: a step as a static graph, and the files that hold it."""
