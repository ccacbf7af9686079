"""The user's side: request an execution, send inputs, receive outputs, see what it cost."""
