"""Running the tasks of an execution: inputs in, outputs out."""
