"""A committee member as a process: the protocol's machine, fed and obeyed."""
