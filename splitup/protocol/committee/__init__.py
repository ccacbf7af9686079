"""One committee member: its events, messages, keys, and what it signs."""
