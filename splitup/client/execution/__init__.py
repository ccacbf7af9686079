"""A running execution on the client's side: sends inputs, receives verified outputs."""
