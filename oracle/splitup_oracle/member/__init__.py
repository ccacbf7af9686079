"""A committee member as a process: the shell around the protocol's state machine."""
