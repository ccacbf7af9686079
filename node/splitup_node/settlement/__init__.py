"""Getting paid, verifying others, and recovering after a crash."""
