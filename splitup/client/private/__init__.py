"""Private models: the client's own tasks, their sessions, and a device that hides its text."""
