"""The user's side: ask for an execution, feed it, take its outputs, see what it cost."""
