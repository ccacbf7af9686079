"""The format of a task: its graph, the rules it obeys, its cost, and the manifest of a model."""
