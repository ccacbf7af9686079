"""A running execution on the client's side: frames out, verified outputs in."""
