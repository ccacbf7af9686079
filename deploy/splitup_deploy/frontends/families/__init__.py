"""What each family of language models is, read from its configuration."""
