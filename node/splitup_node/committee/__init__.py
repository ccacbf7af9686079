"""What a node tells the committee and hears from it."""
