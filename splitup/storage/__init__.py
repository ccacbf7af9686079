"""What is kept: objects behind presigned URLs, logs, caches, and the journal on disk."""
